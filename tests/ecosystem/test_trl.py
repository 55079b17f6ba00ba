"""TRL's trainers on sharded models: each step, and what is logged, is that of one process with the same total batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL's trainers need trl")

from support import trl_trainers
from support.pool import Pool

COLUMNS = {
    "SFTTrainer": ("prompt", "completion"),
    "DPOTrainer": ("prompt", "chosen", "rejected"),
    "GRPOTrainer": ("prompt",),
}


def compare(pool: Pool, kind: str, tp: int, dp: int, seed: int, folder: Path, **settings: Any) -> None:
    """Train on one process with the batches of all replicas, and on ``tp * dp`` ranks."""
    args, options = settings.get("args", {}), settings.get("options", {})
    rows = trl_trainers.sentences(trl_trainers.tiny_config(), seed, 24, COLUMNS[kind])
    args = {"output_dir": str(folder), **args}
    total = {**args, "per_device_train_batch_size": args.get("per_device_train_batch_size", 4) * dp}
    run = trl_trainers.reference_run(kind, seed, total, rows, **options)
    for lines in pool.run(tp * dp, trl_trainers.differences_on_ranks, run, kind, tp, args, rows, options, env=True):
        assert not lines, "\n".join(lines[:30])


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "SFT": ("SFTTrainer", {"gradient_accumulation_steps": 2}),
    "SFT, dft": ("SFTTrainer", {"loss_type": "dft"}),
    "DPO": ("DPOTrainer", {"beta": 0.5}),
    "DPO, weighted": ("DPOTrainer", {"use_weighting": True, "beta": 0.5, "gradient_accumulation_steps": 2}),
    "DPO, synchronized": ("DPOTrainer", {"sync_ref_model": True, "ref_model_sync_steps": 2, "beta": 0.5}),
}


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_tensor_parallel(pool: Pool, kind: str, tmp_path: Path, seed: int) -> None:
    name, args = KINDS[kind]
    compare(pool, name, 2, 1, seed, tmp_path, args=args)


@pytest.mark.zoo
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (1, 2), (2, 2)])
def test_all_sizes(pool: Pool, kind: str, tp: int, dp: int, tmp_path: Path, seed: int) -> None:
    name, args = KINDS[kind]
    compare(pool, name, tp, dp, seed, tmp_path, args=args)


@pytest.mark.zoo
@pytest.mark.parametrize(("tp", "dp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("kind", ["SFT", "DPO", "GRPO"])
def test_adapters(pool: Pool, kind: str, tp: int, dp: int, tmp_path: Path, seed: int) -> None:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    args = {"beta": 0.5} if kind != "SFT" else {}
    compare(pool, f"{kind}Trainer", tp, dp, seed, tmp_path, args=args, options={"peft_config": adapter})


SAMPLED = {
    "beta": 0.2,
    "num_generations": 4,
    "per_device_train_batch_size": 8,
    "max_completion_length": 6,
    "shuffle_dataset": False,
}


@pytest.mark.zoo
@pytest.mark.parametrize("more", [{}, {"num_iterations": 2, "steps_per_generation": 2}], ids=["once", "again"])
def test_completions_of_the_sharded_model(pool: Pool, more: dict[str, int], tmp_path: Path, seed: int) -> None:
    """Ranks sample what one process samples from the same random state."""
    compare(pool, "GRPOTrainer", 2, 1, seed, tmp_path, args={**SAMPLED, **more})


