"""transformers' Trainer on sharded models: each step matches one process with the same total batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from oslo_models.integrations import Trainer

from support import pipelines, trainers
from support.pool import Pool
from support.trainers import SIZES, Run

TRAINED = {"max_grad_norm": 0.5, "weight_decay": 0.1, "warmup_steps": 2}


def train(run: Run, tp: int, pp: int, args: dict[str, Any], rows: trainers.Rows) -> list[str]:
    trainer = trainers.rank_trainer(run, tp, pp, args, rows, Trainer)
    return trainers.differences_of_run(trainer, run)


@pytest.mark.stacks
@trainers.at_sizes("tp=2", "pp=2", "dp=2", "tp=2, dp=2", "tp=2, pp=2")
def test_training_equals_one_process(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    """Losses, norms, learning rates, parameters; labels are averaged over replicas and accumulated batches."""
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    config = pipelines.config("gpt2")
    rows = trainers.text_rows(config, seed, 40)
    args = {"output_dir": str(tmp_path), "gradient_accumulation_steps": 2, **TRAINED}
    total = trainers.arguments(**{**args, "per_device_train_batch_size": 4 * replicas})
    run = trainers.reference_run("GPT2LMHeadModel", config, seed, rows, total, transformers.Trainer)
    for lines in pool.run(ranks, train, run, tp, pp, args, rows, env=True):
        assert not lines, "\n".join(lines)
