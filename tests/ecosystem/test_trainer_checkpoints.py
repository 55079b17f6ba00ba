"""Checkpoints of Trainer on sharded models: resumed training equals uninterrupted training bit for bit."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from oslo_models.integrations import Trainer
from oslo_models.integrations.trainer import STATE

from support import pipelines, trainers
from support.pool import Pool
from support.trainers import SIZES, Run

pytestmark = pytest.mark.drawn(4, of="file")

SAVED = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "gradient_accumulation_steps": 2}
SHUFFLED = (24, 4)
"""Rows, and rows per batch: three batches on each of two replicas, which two accumulated batches do not divide."""


def make_trainer(run: Run, tp: int, pp: int, args: dict[str, Any], seed: int, **options: Any) -> Any:
    """Return a trainer that shuffles its rows."""
    trainers.fresh_accelerate()
    model = pipelines.model_on_stages(run.name, run.config, run.weights, tp, pp, torch.float32, micro_batch_size=2)
    rows = trainers.text_rows(run.config, seed, SHUFFLED[0])
    return Trainer(model, trainers.arguments(**args), train_dataset=rows, **options)


def state_of(trainer: Any) -> tuple[list[float], list[Tensor]]:
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return losses, [param.detach().clone() for param in trainer.model.parameters()]


def resume(run: Run, tp: int, pp: int, args: dict[str, Any], seed: int) -> list[str]:
    """Train six steps; repeat the last two, and then the last four after an interrupted save."""
    trainer = make_trainer(run, tp, pp, args, seed)
    trainer.train()
    losses, params = state_of(trainer)
    folder, main = Path(args["output_dir"]), trainer.is_world_process_zero()
    files = sorted(path.name for path in (folder / "checkpoint-4").iterdir())
    for last, start in ((folder / "checkpoint-4", 4), (True, 2)):
        if last is True and main:
            shutil.rmtree(folder / "checkpoint-6")
            state = folder / "checkpoint-4" / STATE
            state.write_text(state.read_text()[:100])
        torch.distributed.barrier()
        again = make_trainer(run, tp, pp, args, seed)
        torch.rand(7), random.random()  # as a script may do in between
        again.train(resume_from_checkpoint=last if last is True else str(last))
        found, own = state_of(again)
        assert found == losses, f"{found} instead of {losses}, resumed after {start} steps"
        assert all(map(torch.equal, own, params))
    return files


@trainers.at_sizes("tp=2", "pp=2", "tp=2, dp=2")
def test_resumed_training_equals_uninterrupted_training(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    tp, pp, ranks = SIZES[sizes]
    config = pipelines.config("gpt2", dropout=0.3)
    run = Run("GPT2LMHeadModel", config, weights(config, seed))
    args = {"output_dir": str(tmp_path), "per_device_train_batch_size": SHUFFLED[1], **SAVED}
    files = pool.run(ranks, resume, run, tp, pp, args, seed, env=True)[0]
    parts = [f"pytorch_model_tp={t}_pp={p}.bin" for t in range(tp) for p in range(pp)]
    assert [name for name in files if name.startswith(("pytorch_model", "model"))] == (
        parts if tp * pp > 1 else ["model.safetensors"]
    )
    assert {STATE, "config.json", "training_args.bin", "rng_state_0.pth"} < set(files)


def weights(config: Any, seed: int) -> dict[str, Tensor]:
    return trainers.full_parameters(trainers.reference_model("GPT2LMHeadModel", config, seed, torch.float32))


# The best model, the last ones and the final one ----------------------------------------------------------------------


class Spoil(transformers.TrainerCallback):
    """Scales weights up in the third step, so that the model predicts wrong tokens with high confidence."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 3:
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(8.0)


def keep_the_best(run: Run, tp: int, pp: int, args: dict[str, Any], seed: int) -> tuple[float, list[float]]:
    """Train a model that gets worse in its third step."""
    rows = trainers.text_rows(run.config, seed + 1, 8)
    trainer = make_trainer(run, tp, pp, args, seed, eval_dataset=rows, callbacks=[Spoil()])
    trainer.train()
    trainer.save_model()
    history = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    return trainer.evaluate()["eval_loss"], history


@pytest.mark.parametrize("sizes", ["tp=2", "pp=2", "tp=2, dp=2"])
def test_best_model_is_loaded_and_saved_for_transformers(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    tp, pp, ranks = SIZES[sizes]
    config = pipelines.config("gpt2")
    run = Run("GPT2LMHeadModel", config, weights(config, seed))
    args = {"output_dir": str(tmp_path), "max_steps": 4, "save_total_limit": 1}
    args |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "lr_scheduler_type": "constant"}
    results = pool.run(ranks, keep_the_best, run, tp, pp, args, seed, env=True)
    (loss, history), *others = results
    assert loss == pytest.approx(min(history), abs=1e-6) and loss < history[-1] - 1e-3
    assert all(other == results[0] for other in others)
    best = history.index(min(history)) + 1
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*"))] == [f"checkpoint-{best}"]
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    trainers.fresh_accelerate()
    rows = trainers.text_rows(config, seed + 1, 8)
    options = trainers.arguments(tmp_path, per_device_eval_batch_size=4 * (ranks // tp // pp))
    assert transformers.Trainer(model, options, eval_dataset=rows).evaluate()["eval_loss"] == pytest.approx(loss, 1e-5)


# Refusals -------------------------------------------------------------------------------------------------------------


def resume_from(run: Run, args: dict[str, Any], seed: int, how: str) -> None:
    trainer = make_trainer(run, 2, 1, args, seed)
    folder = Path(args["output_dir"]) / "checkpoint-1"
    if how != "nothing":
        trainer.train()
        torch.distributed.barrier()
    if how == "incomplete":
        (folder / STATE).unlink(missing_ok=True)
        torch.distributed.barrier()
    trainer.train(resume_from_checkpoint=True if how == "nothing" else str(folder))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("nothing", "has no complete checkpoint to resume from"),
        ("incomplete", "has no valid"),
        ("only model", "save_only_model=True"),
    ],
)
def test_bad_checkpoints_are_refused(pool: Pool, how: str, message: str, tmp_path: Path, seed: int) -> None:
    config = pipelines.config("gpt2")
    run = Run("GPT2LMHeadModel", config, weights(config, seed))
    args = {"output_dir": str(tmp_path), "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    args["save_only_model"] = how == "only model"
    for error in pool.run(2, resume_from, run, args, seed, how, env=True, expect=ValueError):
        assert message in str(error)
