"""Training with attention by blocks under TRL and PEFT matches one process of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support import zoo
from support.long_masks import by_blocks
from support.pool import Pool

TRL: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT, padded": ("SFTTrainer", {"gradient_accumulation_steps": 2}),
    "SFT, packed": ("SFTTrainer", {"packing": True, "max_length": 24}),
    "SFT, without padding": ("SFTTrainer", {"padding_free": True, "max_length": None}),
    "DPO": ("DPOTrainer", {"beta": 0.5}),
    "GRPO": (
        "GRPOTrainer",
        {
            "beta": 0.2,
            "num_generations": 4,
            "per_device_train_batch_size": 8,
            "max_completion_length": 6,
            "shuffle_dataset": False,
        },
    ),
}


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", TRL)
def test_trainers_of_trl(pool: Pool, kind: str, tmp_path: Path, seed: int) -> None:
    pytest.importorskip("trl", reason="TRL's trainers need trl")
    from support import trl_trainers

    name, args = TRL[kind]
    columns = {"SFTTrainer": ("prompt", "completion"), "DPOTrainer": ("prompt", "chosen", "rejected")}
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 24, columns.get(name, ("prompt",)))
    given = {"output_dir": str(tmp_path), "per_device_train_batch_size": 4, **args}
    options = {}
    if kind == "DPO":  # else rewards are zero up to rounding, and their signs are logged
        peft = pytest.importorskip("peft", reason="peft is not installed")
        adapter = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
        adapter.exclude_modules = ["lm_head"]
        options["peft_config"] = adapter
    run = trl_trainers.reference_run(name, seed, given, rows, **options)
    check = trl_trainers.differences_on_ranks
    for lines in pool.run(2, by_blocks, check, run, name, 2, given, rows, options, env=True):
        assert not lines, "\n".join(lines[:30])


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_adapters(pool: Pool, variant: str, seed: int) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    from support import adapters

    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=3)
    run = adapters.reference_run(zoo.lm_head(variant), zoo.config(variant), config, seed)
    pool.run(2, by_blocks, adapters.check_run, run, 2)
