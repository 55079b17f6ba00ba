"""PEFT's adapters on sharded models, against plain ``peft`` on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import pipelines, zoo
from support.adapters import check_adapters, check_files, check_run, plain_model, reference_run, use_adapters
from support.pool import Pool

peft = pytest.importorskip("peft", reason="peft is not installed")

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


@pytest.mark.parametrize("options", LORA)
@pytest.mark.parametrize("variant", ["llama", "gpt2", "llama-one-kv"])
@pytest.mark.parametrize("tp", [2, 3])
def test_lora_trains_as_on_one_process(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA[options])
    # the gradient of a bias of keys is zero but for rounding, which Adam would make as large as any other
    optimizer = "SGD" if config.lora_bias else "AdamW"
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed, optimizer)
    pool.run(tp, check_run, run, tp)


@pytest.mark.parametrize("options", IA3)
@pytest.mark.parametrize("variant", ["llama", "gpt2", "llama-one-kv"])
@pytest.mark.parametrize("tp", [2, 3])
def test_ia3_trains_as_on_one_process(pool: Pool, seed: int, tp: int, variant: str, options: str) -> None:
    config = peft.IA3Config(task_type="CAUSAL_LM", **IA3[options])
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed)
    pool.run(tp, check_run, run, tp)


FILES = {
    "LoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=3),
    "DoRA": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "down_proj"], r=3, use_dora=True),
    "embeddings": lambda: peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["embed_tokens", "v_proj"], r=3),
    "modules to save": lambda: peft.LoraConfig(r=3, target_modules=["v_proj"], modules_to_save=["lm_head"]),
    "IA3": lambda: peft.IA3Config(task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (2, 2)])
def test_adapters_are_saved_byte_for_byte_as_by_peft(
    pool: Pool, seed: int, tmp_path: Path, kind: str, tp: int, pp: int
) -> None:
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), FILES[kind](), seed, folder=tmp_path / "plain")
    pool.run(tp * pp, check_files, run, tp, pp, str(tmp_path / "plain"), str(tmp_path / "ours"))
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("plain", "ours")]
    for config in configs:
        config["target_modules"] = sorted(config["target_modules"])
    assert configs[0] == configs[1]


@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("tp", [1, 2])
def test_adapters_train_on_pipeline_stages(pool: Pool, seed: int, kind: str, tp: int) -> None:
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), FILES[kind](), seed)
    pool.run(2 * tp, check_run, run, tp, 2)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("use_dora", [False, True])
def test_many_adapters(pool: Pool, seed: int, tmp_path: Path, tp: int, pp: int, use_dora: bool) -> None:
    """Added, selected, disabled, saved, loaded, deleted, combined and merged as by plain ``peft``."""
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "use_dora": use_dora}
    first, other = (
        peft.LoraConfig(r=3, target_modules=targets, **options)
        for targets in (["q_proj", "down_proj"], ["down_proj", "v_proj"])
    )
    run = reference_run("LlamaForCausalLM", pipelines.config("llama"), first, seed)
    model = plain_model(run)
    expected = use_adapters(model, other, run.batches[0], str(tmp_path / "plain"))
    pool.run(tp * pp, check_adapters, run, tp, pp, other, expected, str(tmp_path / "ours"))


PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prompts of the vocabulary": lambda: peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, prompt_tuning_init="SAMPLE_VOCAB"
    ),
    "p-tuning": lambda: peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=7),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("variant", ["llama-9-heads", "gpt2", "llama-one-kv"])
@pytest.mark.parametrize("tp", [2, 3])
def test_prompts_train_as_on_one_process(
    pool: Pool, seed: int, tmp_path: Path, tp: int, variant: str, kind: str
) -> None:
    run = reference_run(zoo.lm_head(variant), zoo.config(variant), PROMPTS[kind](), seed, folder=tmp_path / "plain")
    pool.run(tp, check_run, run, tp)
    pool.run(tp, check_files, run, tp, 1, str(tmp_path / "plain"), str(tmp_path / "ours"))
