"""PEFT's adapters on sharded models, against plain ``peft`` on one process."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from support import pipelines, zoo
from support.adapters import (
    Run,
    check_adapters,
    check_data_parallel,
    check_dropout,
    check_files,
    check_injected,
    check_merged,
    check_run,
    check_variant,
    compare,
    loss_of,
    plain_model,
    reference_run,
    start_from,
    step_with_recorded_masks,
    train,
    trained_parameters,
    use_adapters,
    use_injected,
    use_variant,
)
from support.dropout_masks import RATE, Replay, Shapes, check_masks, join_masks
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, differences, reference_model

pytestmark = pytest.mark.drawn(17, of="file")

peft = pytest.importorskip("peft", reason="peft is not installed")

MODELS = [
    ("llama", 3),  # 2 key-value heads; two ranks share one of them
    ("gpt2", 2),
    *(pytest.param(*each, marks=pytest.mark.zoo) for each in (("llama", 2), ("gpt2", 3), ("llama-one-kv", 2))),
]
LORA: dict[str, dict[str, Any]] = {
    "all linear": {"target_modules": "all-linear", "r": 3},
    "rsLoRA, biases, not zero": {
        "target_modules": "all-linear",
        **{"r": 3, "use_rslora": True, "lora_bias": True, "init_lora_weights": False},
    },
    "DoRA": {"target_modules": "all-linear", "r": 3, "use_dora": True},
    "head": {"target_modules": ["lm_head", "up_proj", "c_fc"], "r": 3},
    "embeddings": {
        "target_modules": ["embed_tokens", "wte", "v_proj", "c_attn"],
        "r": 3,
        "init_lora_weights": "gaussian",
    },
    "DoRA, embeddings and head": {"target_modules": ["embed_tokens", "wte", "lm_head"], "r": 3, "use_dora": True},
    "modules to save": {"target_modules": ["v_proj", "c_attn"], "r": 3, "modules_to_save": ["lm_head"]},
    "embedding to save": {"target_modules": ["v_proj", "c_attn"], "r": 3, "modules_to_save": ["embed_tokens", "wte"]},
    "patterns": {"target_modules": r".*(down_proj|c_proj|k_proj)$", "r": 3, "rank_pattern": {"down_proj": 5}},
}
IA3: dict[str, dict[str, Any]] = {
    "defaults": {},
    "feed-forward": {
        "target_modules": ["k_proj", "o_proj", "up_proj", "down_proj", "c_fc"],
        **{"feedforward_modules": ["up_proj", "down_proj"], "init_ia3_weights": False},
    },
}


@pytest.mark.drawn(5)
@pytest.mark.parametrize("options", LORA)
@pytest.mark.parametrize(("variant", "tp"), MODELS)
def test_lora_trains_as_on_one_process(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA[options])
    # the gradient of a key bias is zero except for rounding errors, and Adam would scale them up
    optimizer = "SGD" if config.lora_bias else "AdamW"
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed, optimizer)
    pool.run(tp, check_run, run, tp)


@pytest.mark.parametrize("options", IA3)
@pytest.mark.parametrize(("variant", "tp"), MODELS)
def test_ia3_trains_as_on_one_process(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    config = peft.IA3Config(task_type="CAUSAL_LM", **IA3[options])
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed)
    pool.run(tp, check_run, run, tp)


LATENT: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=3, target_modules=["kv_a_proj_with_mqa", "kv_b_proj"], init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=3, target_modules=["kv_a_proj_with_mqa", "q_b_proj"], use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["kv_a_proj_with_mqa", "o_proj"], feedforward_modules=["o_proj"]),
}


@pytest.mark.parametrize("kind", LATENT)
def test_adapters_of_latent_attention_train_as_on_one_process(pool: Pool, seed: int, kind: str) -> None:
    """The rotary key part of the latent projection goes into the heads of each rank directly."""
    run = reference_run("DeepseekV3ForCausalLM", zoo.config("deepseek_v3"), LATENT[kind](), seed)
    pool.run(2, check_run, run, 2)


OTHER_EXPERTS = [
    *[("mixtral", 3, 3), ("gpt_oss", 2, 1), ("gpt_oss", 2, 2), ("deepseek_v3", 3, 1), ("mixtral", 1, 1)],
    *[("gpt_oss", 4, 2), ("nemotron_h", 4, 2), ("llama4_text", 2, 2), ("longcat_flash", 2, 2)],
]
EXPERTS: dict[str, dict[str, Any]] = {
    "stacks": {"target_parameters": ["gate_up_proj", "down_proj"], "init_lora_weights": False},
    "one stack and attention": {"target_modules": ["v_proj"], "target_parameters": ["experts.down_proj"]},
    "names of files": {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"]},
}
"""Ways of ``peft`` to adapt experts; names of experts in files become names of the stacks."""


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(
    ("variant", "tp", "ep"),
    [
        ("mixtral", 2, 1),
        ("qwen3_moe", 2, 2),
        ("mixtral", 4, 2),
        *(pytest.param(*each, marks=pytest.mark.zoo) for each in OTHER_EXPERTS),
    ],
)
def test_adapters_of_experts_train_as_on_one_process(
    pool: Pool, seed: int, variant: str, tp: int, ep: int, kind: str
) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=3, **EXPERTS[kind])
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed)
    pool.run(tp, check_run, run, tp, 1, {"expert_parallel_size": ep})


@pytest.mark.parametrize(
    ("tp", "pp", "ep"),
    [(2, 1, 2), (4, 1, 2), (1, 1, 2), *(pytest.param(*each, marks=pytest.mark.zoo) for each in ((2, 2, 1), (2, 1, 4)))],
)
def test_adapters_of_experts_are_saved_and_merged(
    pool: Pool, seed: int, tmp_path: Path, tp: int, pp: int, ep: int
) -> None:
    world = pp * max(tp, ep)
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["q_proj"], target_parameters=["down_proj"])
    name, config = zoo.lm_head("mixtral"), zoo.config("mixtral")
    run = reference_run(name, config, adapter, seed, folder=tmp_path / "plain")
    options = {"expert_parallel_size": ep}
    pool.run(world, check_files, run, tp, pp, str(tmp_path / "plain"), str(tmp_path / "ours"), options)
    plain = peft.PeftModel.from_pretrained(reference_model(name, config, seed), tmp_path / "plain")
    loss = loss_of(plain.eval().merge_and_unload(), run.batches[0])
    pool.run(world, check_merged, run, tp, pp, loss, options)


FILES = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=3),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], r=3, use_dora=True),
    "embeddings": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "v_proj"], r=3),
    "modules to save": lambda: peft.LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(("tp", "pp"), [pytest.param(2, 1, marks=pytest.mark.zoo), (3, 1), (2, 2)])
def test_adapters_are_saved_byte_for_byte_as_by_peft(
    pool: Pool, seed: int, tmp_path: Path, kind: str, tp: int, pp: int
) -> None:
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), FILES[kind](), seed, folder=tmp_path / "plain")
    pool.run(tp * pp, check_files, run, tp, pp, str(tmp_path / "plain"), str(tmp_path / "ours"))
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("plain", "ours")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_train_on_pipeline_stages(pool: Pool, seed: int, kind: str, tp: int) -> None:
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), FILES[kind](), seed)
    pool.run(2 * tp, check_run, run, tp, 2)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(("tp", "pp"), [pytest.param(3, 1, marks=pytest.mark.zoo), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("use_dora", [False, True])
def test_many_adapters(pool: Pool, seed: int, tmp_path: Path, tp: int, pp: int, use_dora: bool) -> None:
    """Adapters are added, selected, disabled, saved, loaded, deleted, combined and merged as in plain ``peft``."""
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "use_dora": use_dora}
    first, other = (
        peft.LoraConfig(r=3, target_modules=targets, **options)
        for targets in (["q_proj", "down_proj"], ["down_proj", "v_proj"])
    )
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), first, seed)
    model = plain_model(run)
    expected = use_adapters(model, other, run.batches[0], str(tmp_path / "plain"))
    pool.run(tp * pp, check_adapters, run, tp, pp, other, expected, str(tmp_path / "ours"))
    merged = [load_file(tmp_path / name / "merged" / "model.safetensors") for name in ("plain", "ours")]
    assert merged[0].keys() == merged[1].keys()
    assert not [line for key in merged[0] for line in differences(key, merged[1][key], merged[0][key], TOLERANCE)]


PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompts of the vocabulary": lambda: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="SAMPLE_VOCAB"
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=7),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.drawn(4)
@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize(("variant", "tp"), [("llama-9-heads", 2), ("gpt2", 3), ("llama-one-kv", 2)])
def test_prompts_train_as_on_one_process(
    pool: Pool, seed: int, tmp_path: Path, tp: int, variant: str, kind: str
) -> None:
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), PROMPTS[kind](), seed, folder=tmp_path / "plain")
    pool.run(tp, check_run, run, tp)
    pool.run(tp, check_files, run, tp, 1, str(tmp_path / "plain"), str(tmp_path / "ours"))


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("tp", [2, 3])
def test_masks_of_dropout(pool: Pool, seed: int, tp: int, rate: float, use_dora: bool) -> None:
    """Masks are equal for replicated inputs and independent for sharded ones, with and without the model's dropout."""
    name, config = "LlamaForCausalLM", zoo.config("llama", dropout=rate)
    adapter = peft.LoraConfig(r=3, target_modules="all-linear", lora_dropout=RATE, use_dora=use_dora)
    run = reference_run(name, config, adapter, seed)
    of_ranks = pool.run(tp, step_with_recorded_masks, run, tp)
    model = plain_model(run, attn_implementation="eager")
    model.load_state_dict(run.start, strict=False)
    with lifted_casts(), Shapes() as calls:
        model(**run.batches[0])
    masks = [masks for _, _, masks in of_ranks]
    assert calls.shapes and {len(calls.shapes)} == {len(own) for own in masks}
    joined = [join_masks(parts, shape) for parts, shape in zip(zip(*masks, strict=True), calls.shapes, strict=True)]
    with lifted_casts(), Replay([mask for mask, _ in joined]):
        loss = model(**run.batches[0]).loss
    loss.backward()
    gradients = {key: param.grad for key, param in trained_parameters(model).items()}
    assert not (lines := check_dropout(run, loss.item(), gradients, of_ranks)), "\n".join(lines[:12])
    check_masks([mask for mask, sharded in joined if sharded], [mask for mask, sharded in joined if not sharded], masks)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (2, 2)])
def test_methods_of_transformers(pool: Pool, seed: int, tmp_path: Path, tp: int, pp: int) -> None:
    adapter = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    saved = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"])
    config = pipelines.config("llama")
    run = reference_run("LlamaForCausalLM", config, saved, seed, folder=tmp_path / "saved")
    run.adapter = adapter
    plain = reference_model(run.name, run.config, seed).eval()
    folders = tmp_path / "plain", tmp_path / "ours"
    expected = use_injected(plain, adapter, str(tmp_path / "saved"), run.batches[0], str(folders[0]), seed)
    pool.run(tp * pp, check_injected, run, tp, pp, str(tmp_path / "saved"), str(folders[1]), expected)
    files = [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]
    assert files[0] == files[1]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
def test_replicas_train_as_one_process(pool: Pool, seed: int, tp: int, wrapper: str) -> None:
    adapter = peft.LoraConfig(r=3, target_modules="all-linear", modules_to_save=["lm_head"])
    check_replicas(pool, seed, tp, wrapper, "llama", adapter)


@pytest.mark.parametrize(
    ("tp", "ep", "wrapper"),
    [(1, 2, "DDP"), *(pytest.param(*each, marks=pytest.mark.zoo) for each in ((2, 4, "DDP"), (1, 2, "FSDP2")))],
)
def test_adapters_of_experts_over_replicas_train_as_one_process(
    pool: Pool, seed: int, tp: int, ep: int, wrapper: str
) -> None:
    adapter = peft.LoraConfig(r=3, **EXPERTS["one stack and attention"])
    check_replicas(pool, seed, tp, wrapper, "mixtral", adapter, expert_parallel_size=ep)


@pytest.mark.parametrize(
    ("tp", "ep"), [(1, 2), *(pytest.param(*each, marks=pytest.mark.zoo) for each in ((2, 2), (2, 4)))]
)
def test_adapters_of_experts_with_context_parallelism_train_as_one_process(
    pool: Pool, seed: int, tp: int, ep: int
) -> None:
    adapter = peft.LoraConfig(r=3, **EXPERTS["one stack and attention"])
    run = reference_run(zoo.lm_head("mixtral"), zoo.config("mixtral"), adapter, seed)
    pool.run(2 * tp, check_run, run, tp, 1, {"context_parallel_size": 2, "expert_parallel_size": ep})


def check_replicas(pool: Pool, seed: int, tp: int, wrapper: str, variant: str, adapter: Any, **options: Any) -> None:
    name, config = zoo.lm_head(variant), zoo.config(variant)
    run = reference_run(name, config, adapter, seed)
    run.batches = [joined_batch(name, config, seed + 2 * step) for step in range(2)]
    model = plain_model(run)
    model.load_state_dict(run.start, strict=False)
    params = list(trained_parameters(model).values())
    stepper, norms = torch.optim.SGD(params, lr=0.01), []
    run.losses = []
    for batch in run.batches:
        stepper.zero_grad()
        with lifted_casts():
            loss = model(**batch).loss
            loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params, 0.1).item())
        stepper.step()
        run.losses.append(loss.item())
    pool.run(2 * tp, check_data_parallel, run, wrapper, tp, norms, options)


def joined_batch(name: str, config: Any, seed: int) -> dict[str, torch.Tensor]:
    """Even and odd rows have equally many labels, so that both means have the same weight."""
    one, two = (zoo.batch(name, config, seed + part) for part in range(2))
    two["labels"] = torch.where(one["labels"] != -100, two["labels"].clamp(min=0), -100)
    return {key: torch.stack([one[key], two[key]], 1).flatten(0, 1) for key in one}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "LoHa": (lambda: peft.LoHaConfig(target_modules=["q_proj"]), "has the type LOHA, .*supported: LoRA"),
    "OFT": (lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=2), "has the type OFT"),
    "PiSSA": (
        lambda: peft.LoraConfig(init_lora_weights="olora", target_modules=["q_proj"]),
        "init_lora_weights='olora'",
    ),
    "tokens": (
        lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1]),
        "trainable_token_indices=.*modules_to_save",
    ),
    "a parameter of a layer": (
        lambda: peft.LoraConfig(target_modules=[], target_parameters=["q_proj.weight"]),
        "name stacked experts, but .*q_proj is a .*: name it in target_modules",
    ),
    "IA3 on the head": (
        lambda: peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
        "IA3 does not work on lm_head",
    ),
    "prompts": (
        lambda: peft.CPTConfig(task_type="CAUSAL_LM", cpt_token_ids=[1], cpt_mask=[1], cpt_tokens_type_mask=[1]),
        "CPT",
    ),
}


def refuse(config: Any, message: str) -> None:
    from oslo_models import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), 2)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(model, config)


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_calls_are_refused_by_name(pool: Pool, kind: str) -> None:
    make, message = REFUSED[kind]
    pool.run(2, refuse, make(), message)


def refuse_old_version(config: Any, variant: str) -> None:
    from oslo_models import LlamaForCausalLM, installed

    model: Any = LlamaForCausalLM.from_config_with_parallel(zoo.config(variant), 2)
    is_old = mock.patch.object(installed, "installed_version", lambda *_: "0.20.1")
    with is_old, pytest.raises(ImportError, match=r"need peft 0\.21 or later, but 0\.20\.1 is installed"):
        peft.get_peft_model(model, config)


@pytest.mark.parametrize("kind", ["LoRA", "prompts"])
def test_older_versions_are_refused_on_every_rank(pool: Pool, kind: str) -> None:
    """They would draw other initial values, and merge shards of another shape."""
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    config = peft.LoraConfig(task_type="CAUSAL_LM") if kind == "LoRA" else prompts
    pool.run(2, refuse_old_version, config, "llama")


def refuse_biases() -> None:
    from oslo_models import GptOssForCausalLM

    model: Any = GptOssForCausalLM.from_config_with_parallel(
        zoo.config("gpt_oss"), 2, seed=0, experts_implementation="eager"
    )
    with pytest.raises(ValueError, match=r"down_proj_bias of .*experts is not a stack of matrices, .*leave it out"):
        peft.get_peft_model(model, peft.LoraConfig(target_parameters=["down_proj_bias"]))


def test_adapters_of_biases_of_experts_are_refused(pool: Pool) -> None:
    pool.run(2, refuse_biases)


def adapt_one_stage(config: Any, message: str) -> None:
    """On each of two stages: the adapter of one stage raises, an adapter of both stages works."""
    from oslo_models import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_config_with_parallel(pipelines.config("llama"), 1, 2)
    with pytest.raises(ValueError, match=message):
        peft.get_peft_model(model, config)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], layers_to_transform=[0, 3]))
    assert len([name for name, param in adapted.named_parameters() if param.requires_grad]) == 2


@pytest.mark.parametrize(
    ("targets", "layers", "message"),
    [
        (
            ["q_proj"],
            [0],
            r"target_modules={'q_proj'}, layers_to_transform=\[0\]\) has no layer on .* \[1\] of 2",
        ),
        (r"model\.layers\.3\.mlp\.up_proj", None, r"has no layer on the pipeline stages \[0\] of 2"),
        (["no_such_layer"], None, "not found in the base model"),
    ],
)
def test_adapters_of_one_stage_are_refused_on_all(pool: Pool, targets: Any, layers: Any, message: str) -> None:
    config = peft.LoraConfig(target_modules=targets, layers_to_transform=layers)
    pool.run(2, adapt_one_stage, config, message)


def combine_whole_adapters(config: Any) -> None:
    """On each rank: a combination that needs full adapters raises before it adds an adapter."""
    from oslo_models import LlamaForCausalLM

    model: Any = peft.get_peft_model(LlamaForCausalLM.from_config_with_parallel(zoo.config("llama"), 2), config)
    model.add_adapter("other", copy.deepcopy(config))
    with pytest.raises(ValueError, match=r'combination_type=.ties. needs whole adapters.*"cat" or "linear"'):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="ties", density=0.5)
    assert list(model.peft_config) == ["default", "other"]


def test_combinations_of_whole_adapters_are_refused(pool: Pool) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    pool.run(2, combine_whole_adapters, config)


def adapt_processes(run: Run) -> None:
    """On each rank: adapters of a model sharded over processes by `tensor_parallel`."""
    from oslo_models.compat.tensor_parallel.api import tensor_parallel

    full = reference_model(run.name, run.config, run.seed)
    with pytest.raises(ValueError, match=r"has the adapters \['default'\].*add or load them afterwards"):
        tensor_parallel(peft.get_peft_model(copy.deepcopy(full), copy.deepcopy(run.adapter)), distributed=True)
    torch.manual_seed(run.seed)
    model = peft.get_peft_model(tensor_parallel(full, distributed=True).train(), copy.deepcopy(run.adapter))
    start_from(model, run.start)
    losses, gradients, trained = train(model, run.batches, run.optimizer)
    assert losses == pytest.approx(run.losses, abs=TOLERANCE)
    lines = compare(model, "gradient", gradients[-1], run.gradients[-1])
    lines += compare(model, "trained", trained[-1], run.trained[-1])
    assert not lines, "\n".join(lines[:12])


def test_lora_after_tensor_parallel_of_processes(pool: Pool, seed: int) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=3)
    run = reference_run("LlamaForCausalLM", zoo.config("llama"), config, seed)
    pool.run(2, adapt_processes, run, env=True)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("how", ["generate", "checkpointing", "low memory", "fused", "fused before"])
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "lm_head"]])
def test_together_with(pool: Pool, seed: int, tmp_path: Path, how: str, targets: Any) -> None:
    adapter = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=3)
    run = reference_run("LlamaForCausalLM", zoo.config("llama-untied"), adapter, seed, folder=tmp_path)
    model = plain_model(run, attn_implementation="eager")
    model.load_state_dict(run.start, strict=False)
    expected = use_variant(model, how, run.batches[0])
    pool.run(2, check_variant, run, 2, how, str(tmp_path), expected)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["SEQ_CLS", "TOKEN_CLS"])
def test_heads_of_classification(pool: Pool, seed: int, tp: int, pp: int, kind: str) -> None:
    """``peft`` adds their heads to ``modules_to_save`` itself."""
    name = {"SEQ_CLS": "BertForSequenceClassification", "TOKEN_CLS": "BertForTokenClassification"}[kind]
    adapter = peft.LoraConfig(task_type=kind, target_modules=["query", "dense"], r=3)
    run = reference_run(name, pipelines.config("bert"), adapter, seed, "SGD")
    pool.run(tp * pp, check_run, run, tp, pp)


@pytest.mark.parametrize("options", [*LORA, *IA3])
@pytest.mark.parametrize(("variant", "tp"), [("llama", 2), ("gpt2", 2)])
def test_adapters_train_with_parts_of_tokens(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    """Sequence parallelism."""
    of_lora = options in LORA
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA[options]) if of_lora else peft.IA3Config(**IA3[options])
    config.task_type = "CAUSAL_LM"
    optimizer = "SGD" if getattr(config, "lora_bias", False) else "AdamW"
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed, optimizer)
    pool.run(tp, check_run, run, tp, 1, {"sequence_parallel": True})


@pytest.mark.parametrize("options", [*LORA, *IA3])
@pytest.mark.parametrize(
    ("variant", "tp"), [("llama", 1), ("gpt2", 1), pytest.param("llama", 2, marks=pytest.mark.zoo)]
)
def test_adapters_train_with_context_parallelism(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    check_context(pool, seed, tp, 1, variant, options)


@pytest.mark.parametrize(
    ("variant", "tp"),
    [
        ("lfm2", 1),
        *(pytest.param(*each, marks=pytest.mark.zoo) for each in (("bamba", 1), ("qwen3_5_text", 1), ("bamba", 2))),
    ],
)
def test_adapters_of_mixers_train_with_context_parallelism(pool: Pool, seed: int, variant: str, tp: int) -> None:
    check_context(pool, seed, tp, 1, variant, "all linear")


@pytest.mark.parametrize(
    "options",
    [each if each == "all linear" else pytest.param(each, marks=pytest.mark.zoo) for each in (*LORA, *IA3)],
)
def test_adapters_train_with_context_parallelism_on_stages(pool: Pool, seed: int, options: str) -> None:
    check_context(pool, seed, 1, 2, "llama", options)


def check_context(pool: Pool, seed: int, tp: int, pp: int, variant: str, options: str) -> None:
    of_lora = options in LORA
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA[options]) if of_lora else peft.IA3Config(**IA3[options])
    config.task_type = "CAUSAL_LM"
    optimizer = "SGD" if getattr(config, "lora_bias", False) else "AdamW"
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed, optimizer)
    pool.run(2 * tp * pp, check_run, run, tp, pp, {"context_parallel_size": 2})
