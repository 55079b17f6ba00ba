"""QLoRA as a recipe: `load_in_4bit` trains on two ranks as by TRL's command."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl", reason="recipes are TRL's")

from support import quantized, recipes
from support.pool import Pool
from support.trl_trainers import tiny_tokenizer

pytestmark = pytest.mark.quantization

EXACT, ROUNDED = 1e-5, 1e-3
"""Relative tolerances of the first loss, in float32, and of later ones: TRL casts the adapters to bfloat16."""
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "o_proj", "down_proj"], "lora_dropout": 0.0}
# a small learning rate: steps in bfloat16 amplify its rounding
KEYS = {**LORA, "load_in_4bit": True, "use_bnb_nested_quant": True, "dtype": "float32", "learning_rate": 1e-3}


def write_model(folder: Path, seed: int) -> None:
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    config = quantized.llama_config(
        hidden_size=192, head_dim=32, intermediate_size=384, vocab_size=37, pad_token_id=0, eos_token_id=1
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    tiny_tokenizer(config.vocab_size).save_pretrained(folder / "model")


@pytest.mark.parametrize("task", ["sft", pytest.param("dpo", marks=pytest.mark.zoo)])
def test_qlora_recipe_trains_as_by_trl(
    task: str, pool: Pool, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    from datasets import load_dataset

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # TRL's command adds the working directory
    write_model(tmp_path, seed)
    recipe = recipes.write_recipe(tmp_path, task, seed, **KEYS)
    splits: Any = load_dataset("json", data_files=str(tmp_path / f"{task}.jsonl"))
    recipes.run_trl(task, recipe, tmp_path / "trl", splits)
    pool.run(2, recipes.run_on_rank, task, [str(recipe)], env=True)
    expected, found = recipes.logged(tmp_path / "trl", 4), recipes.logged(tmp_path / "out", 4)
    assert len(expected) == len(found) == 4
    for own, right, tolerance in zip(found, expected, (EXACT, *[ROUNDED] * 3), strict=True):
        assert abs(own["loss"] - right["loss"]) < tolerance * abs(right["loss"]), (own, right)
    saved, trl = recipes.saved(tmp_path / "out"), recipes.saved(tmp_path / "trl")
    assert saved.keys() == trl.keys() and any("lora_B" in name for name in trl)
    for name, tensor in trl.items():
        assert saved[name].dtype == tensor.dtype
        if "lora_B" in name:  # begins with zeros
            assert (saved[name] - tensor).abs().mean() < 0.1 * tensor.abs().mean(), name
