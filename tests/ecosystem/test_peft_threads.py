"""PEFT's adapters on `tensor_parallel` models, with threads as ranks, against plain ``peft`` on one model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oslo_models.compat.tensor_parallel.api import tensor_parallel

from support import pipelines, zoo
from support.adapters import Run, logits_of, loss_of, plain_model, reference_run, use_adapters, use_injected
from support.float64 import lifted_casts
from support.reference import TOLERANCE, differences, reference_model
from support.tensor_parallel import tensor_parallel_model

peft = pytest.importorskip("peft", reason="peft is not installed")

KINDS: dict[str, Callable[[], Any]] = {
    "LoRA, all linear": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=3),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=3, use_dora=True),
    "embeddings": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "wte", "lm_head"]),
    "norms to save": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["v_proj", "c_attn"], modules_to_save=["norm", "ln_f"]
    ),
    "names of the full model": lambda: peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=r"(model\.layers\.1\.self_attn\.[qo]_proj|transformer\.h\.1\.mlp\.c_proj)"
    ),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}
SLOW = pytest.mark.zoo
CASES = [
    ("llama", 3, True, "LoRA, all linear"),
    ("llama-one-kv", 2, True, "norms to save"),
    ("gpt2", 2, False, "names of the full model"),
    *(
        pytest.param(variant, n, sharded, kind, marks=SLOW)
        for variant, n in (("llama", 2), ("llama", 3), ("gpt2", 2), ("llama-one-kv", 2))
        for sharded in (True, False)
        for kind in KINDS
    ),
]


def model_of_threads(run: Run, n: int = 2, **options: Any) -> Any:
    return tensor_parallel_model(reference_model(run.name, run.config, run.seed), n, **options)


@pytest.mark.parametrize(("variant", "n", "sharded", "kind"), CASES)
def test_adapters_train_and_are_saved_as_by_plain_peft(
    tmp_path: Path, seed: int, variant: str, n: int, sharded: bool, kind: str
) -> None:
    adapter, name = KINDS[kind](), zoo.lm_head(variant)
    run = reference_run(name, zoo.config(variant), copy.deepcopy(adapter), seed, "SGD", tmp_path / "plain")
    base = model_of_threads(run, n, sharded=sharded).train()
    torch.manual_seed(seed)
    model: Any = peft.get_peft_model(base, copy.deepcopy(adapter))
    state = model.state_dict()
    lines = [line for key, x in run.initial.items() for line in differences(key, state[key], x, TOLERANCE)]
    assert not model.load_state_dict(run.start, strict=False).unexpected_keys
    assert run.logits is not None
    lines += differences("logits", logits_of(model, run.batches[0]), run.logits, TOLERANCE)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.01)
    for batch, expected in zip(run.batches, run.losses, strict=True):
        optimizer.zero_grad()
        with lifted_casts():
            loss = model(**batch).loss
            loss.backward()
        assert loss.item() == pytest.approx(expected, abs=TOLERANCE)
        optimizer.step()
    state = model.state_dict()
    lines += [line for key, x in run.trained[-1].items() for line in differences(key, state[key], x, TOLERANCE)]
    assert not lines, "\n".join(lines[:12])
    loaded: Any = peft.PeftModel.from_pretrained(model_of_threads(run, n, sharded=sharded), tmp_path / "plain")
    loaded.save_pretrained(tmp_path / "ours")
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        files = [(tmp_path / folder / file).read_bytes() for folder in ("plain", "ours")]
        assert len(files[0]) == len(files[1]) if file.endswith("json") else files[0] == files[1]  # json has sets


def test_many_adapters(seed: int, tmp_path: Path) -> None:
    """Adapters are added, selected, disabled, saved, loaded, deleted, combined and merged as in plain ``peft``."""
    options = {"task_type": "CAUSAL_LM", "r": 3, "init_lora_weights": False}
    first, other = (
        peft.LoraConfig(target_modules=targets, **options)
        for targets in (["q_proj", "down_proj"], ["down_proj", "v_proj"])
    )
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), first, seed)
    expected = use_adapters(plain_model(run), other, run.batches[0], str(tmp_path / "plain"))
    base = model_of_threads(run).train()
    torch.manual_seed(seed)
    actual = use_adapters(peft.get_peft_model(base, first), other, run.batches[0], str(tmp_path / "ours"))
    lines = [line for what in expected for line in differences(what, actual[what], expected[what], TOLERANCE)]
    assert not lines, "\n".join(lines)


def test_methods_of_transformers(seed: int, tmp_path: Path) -> None:
    saved = peft.LoraConfig(r=2, target_modules=["v_proj", "down_proj"])
    adapter = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    run = reference_run("LlamaForCausalLM", zoo.config("llama"), saved, seed, folder=tmp_path / "saved")
    models = [reference_model(run.name, run.config, seed).eval(), model_of_threads(run).eval()]
    losses = [
        use_injected(model, adapter, str(tmp_path / "saved"), run.batches[0], str(tmp_path / f"{i}"), seed)
        for i, model in enumerate(models)
    ]
    assert torch.stack(losses[0]).tolist() == pytest.approx(torch.stack(losses[1]).tolist(), abs=TOLERANCE)
    files = [(tmp_path / f"{i}" / "adapter_model.safetensors").read_bytes() for i in range(2)]
    assert files[0] == files[1]


@pytest.mark.parametrize("wrapped", [True, False])
def test_models_that_have_adapters_are_sharded_with_them(seed: int, wrapped: bool) -> None:
    options = {"r": 2, "init_lora_weights": False}
    first = peft.LoraConfig(target_modules=["q_proj", "down_proj"], **options)
    second = peft.LoraConfig(target_modules=["v_proj"], modules_to_save=["lm_head", "norm"] * wrapped, **options)
    full: Any = reference_model("LlamaForCausalLM", zoo.config("llama"), seed)
    if wrapped:
        full = peft.get_peft_model(full, first, "first")
        full.add_adapter("second", second)
    else:
        full.add_adapter(first, "first")
        full.add_adapter(second, "second")
    full.set_adapter("first")  # not the adapter added last
    before = {name: tensor.clone() for name, tensor in full.state_dict().items()}
    random_state = torch.get_rng_state()
    model = tensor_parallel(full, ["cpu", "cpu"])
    assert torch.equal(torch.get_rng_state(), random_state)
    batch = zoo.batch("LlamaForCausalLM", full.config, seed)
    for name in (None, "first", "second"):
        for each in (full, model) if name else ():
            each.set_adapter(name)
        losses = [loss_of(each, batch).item() for each in (full, model)]
        assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE)
    for state in (full.state_dict(), model.state_dict()):
        assert state.keys() == before.keys()
        assert all(torch.equal(state[name], before[name]) for name in before)
    trained = {name for name, param in full.named_parameters() if param.requires_grad}
    for rank in range(2):
        part = {name for name, param in model.named_parameters() if param.requires_grad and f"parts.{rank}." in name}
        assert {name.replace(f"parts.{rank}.", "") for name in part} == trained


def test_options_without_support_for_threads_are_refused(seed: int) -> None:
    full: Any = reference_model("LlamaForCausalLM", zoo.config("llama"), seed)
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with pytest.raises(ValueError, match=r"prompts do not work .*LoRA or IA3.*distributed=True"):
        peft.get_peft_model(tensor_parallel(full, ["cpu", "cpu"]), prompts)
    with pytest.raises(ValueError, match=r"are prompts, .*LoRA or IA3.*distributed=True"):
        tensor_parallel(peft.get_peft_model(copy.deepcopy(full), prompts), ["cpu", "cpu"])
    dora = peft.LoraConfig(target_modules=["o_proj"], use_dora=True, init_lora_weights=False)
    model: Any = peft.get_peft_model(copy.deepcopy(full), dora)
    adapted: Any = tensor_parallel(model, ["cpu", "cpu"])
    with pytest.raises(RuntimeError, match=r"merging an adapter with use_dora=True.*on the model of one process"):
        adapted.merge_adapter()
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"adapters are merged .*o_proj: call unmerge_adapter\(\) before"):
        tensor_parallel(model, ["cpu", "cpu"])
    with pytest.raises(ValueError, match=r"has the adapters \['default'\].*merge_and_unload"):
        adapted.get_base_model().deparallelize()


def combine(model: Any) -> None:
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False))
    with pytest.raises(ValueError, match=r'combination_type=.svd. needs whole adapters.*"cat" or "linear"'):
        model.add_weighted_adapter(["default", "other"], [0.5, 0.5], "both", combination_type="svd")
    assert list(model.peft_config) == ["default", "other"]


def test_combinations_of_whole_adapters_are_refused(seed: int) -> None:
    full: Any = reference_model("LlamaForCausalLM", zoo.config("llama"), seed)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    combine(peft.get_peft_model(tensor_parallel(full, ["cpu", "cpu"]), config))
