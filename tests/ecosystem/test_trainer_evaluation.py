"""Evaluation and prediction by Trainer on sharded models: each sample counts once, every rank gets all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
import transformers

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")

from oslo_models.integrations import Seq2SeqTrainer, Trainer

from support import pipelines, trainers
from support.pool import Pool
from support.reference import TOLERANCE
from support.trainers import SIZES, Run

EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 2}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of correctly predicted tokens, and the number of samples."""
    predicted, labels = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
    counted = labels != -100
    return {"accuracy": float((predicted == labels)[counted].mean()), "samples": len(labels)}


def evaluate(trainer: Any, test_rows: trainers.Rows) -> tuple[dict[str, float], Any]:
    """Evaluate before and during training, and predict afterwards."""
    first = trainers.in_float64(trainer.evaluate)
    trainers.in_float64(trainer.train)
    logged = [log for log in trainer.state.log_history if "eval_loss" in log][-1]
    predicted = trainers.in_float64(lambda: trainer.predict(test_rows))
    names = ("eval_loss", "eval_accuracy", "eval_samples")
    figures = {f"{when} {name}": log[name] for when, log in (("first", first), ("last", logged)) for name in names}
    return figures, predicted


def evaluate_on_ranks(
    run: Run, tp: int, pp: int, args: dict[str, Any], rows: tuple[trainers.Rows, ...], expected: Any
) -> None:
    options = {"eval_dataset": rows[1], "compute_metrics": accuracy}
    trainer = trainers.rank_trainer(run, tp, pp, args, rows[0], Trainer, **options)
    figures, predicted = evaluate(trainer, rows[2])
    assert figures == pytest.approx(expected[0], abs=TOLERANCE)
    assert predicted.predictions.shape == expected[1].predictions.shape
    assert numpy.abs(predicted.predictions - expected[1].predictions).max() < TOLERANCE
    assert (predicted.label_ids == expected[1].label_ids).all()


@trainers.at_sizes("tp=2", "pp=2", "tp=2, dp=2")
def test_evaluation_equals_one_process(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    """The test set has 11 rows, which neither batches nor micro-batches divide."""
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    config = pipelines.config("gpt2")
    rows = tuple(trainers.text_rows(config, seed + i, count) for i, count in enumerate((16, 16, 11)))
    args = {"output_dir": str(tmp_path), **EVALUATED}
    per_device = {f"per_device_{phase}_batch_size": 4 * replicas for phase in ("train", "eval")}
    run = Run("GPT2LMHeadModel", config, {})
    model = trainers.reference_model(run.name, config, seed)
    run.weights = trainers.full_parameters(model)
    trainers.fresh_accelerate()
    reference = type("Reference", (trainers.Ordered, transformers.Trainer), {})(
        model,
        trainers.arguments(**{**args, **per_device}),
        train_dataset=rows[0],
        eval_dataset=rows[1],
        compute_metrics=accuracy,
    )
    expected = evaluate(reference, rows[2])
    assert expected[0]["first eval_samples"] == 16 and len(expected[1].predictions) == 11
    pool.run(ranks, evaluate_on_ranks, run, tp, pp, args, rows, expected, env=True)


# Generation -----------------------------------------------------------------------------------------------------------


def generate_on_ranks(
    run: Run, tp: int, pp: int, args: dict[str, Any], rows: tuple[trainers.Rows, ...], expected: Any, loss: float
) -> None:
    args = {**args, "gradient_accumulation_steps": 2, "cls": transformers.Seq2SeqTrainingArguments}
    trainer = trainers.rank_trainer(run, tp, pp, args, rows[0], Seq2SeqTrainer, eval_dataset=rows[1])
    trainers.in_float64(trainer.train)
    assert abs(trainer.state.log_history[0]["loss"] - loss) < TOLERANCE
    predicted = trainers.in_float64(lambda: trainer.predict(rows[1], max_length=8, num_beams=2))
    assert (predicted.predictions == expected.predictions).all()
    assert (predicted.label_ids == expected.label_ids).all()
    assert abs(predicted.metrics["test_loss"] - expected.metrics["test_loss"]) < TOLERANCE


@pytest.mark.parametrize("sizes", ["tp=2", "pp=2", "tp=2, dp=2"])
def test_seq2seq_predicts_by_generation(pool: Pool, sizes: str, tmp_path: Path, seed: int) -> None:
    """Train one step on two accumulated batches, with a mean over each in T5; one process uses one batch."""
    tp, pp, ranks = SIZES[sizes]
    replicas = ranks // (tp * pp)
    config = pipelines.config("t5")
    rows = tuple(trainers.text_rows(config, seed + i, 16 - 8 * i, masked=0) for i in range(2))
    args: dict[str, Any] = {"output_dir": str(tmp_path), "max_steps": 1, "predict_with_generate": True}
    per_device = {"per_device_train_batch_size": 8 * replicas, "per_device_eval_batch_size": 4 * replicas}
    cls = {"cls": transformers.Seq2SeqTrainingArguments}
    run = Run("T5ForConditionalGeneration", config, {})
    model = trainers.reference_model(run.name, config, seed)
    run.weights = trainers.full_parameters(model)
    trainers.fresh_accelerate()
    reference = type("Reference", (trainers.Ordered, transformers.Seq2SeqTrainer), {})(
        model, trainers.arguments(**{**args, **per_device, **cls}), train_dataset=rows[0], eval_dataset=rows[1]
    )
    trainers.in_float64(reference.train)
    expected = trainers.in_float64(lambda: reference.predict(rows[1], max_length=8, num_beams=2))
    loss = reference.state.log_history[0]["loss"]
    pool.run(ranks, generate_on_ranks, run, tp, pp, args, rows, expected, loss, env=True)


def predict_on_ranks(run: Run, pp: int, args: dict[str, Any], rows: trainers.Rows, expected: Any) -> None:
    trainer = trainers.rank_trainer(run, 1, pp, args, rows, Trainer)
    predictions = trainers.in_float64(lambda: trainer.predict(rows)).predictions
    assert numpy.abs(predictions - expected).max() < TOLERANCE


def test_predictions_of_stages_leave_out_fields_of_other_stages(pool: Pool, tmp_path: Path, seed: int) -> None:
    config = pipelines.config("gpt2", output_hidden_states=True)
    rows, args = trainers.text_rows(config, seed, 4), {"output_dir": str(tmp_path)}
    run = Run("GPT2LMHeadModel", config, {})
    model = trainers.reference_model(run.name, config, seed)
    run.weights = trainers.full_parameters(model)
    trainers.fresh_accelerate()
    reference = transformers.Trainer(model, trainers.arguments(**args))
    logits, hidden_states = trainers.in_float64(lambda: reference.predict(rows)).predictions[:2]
    assert len(hidden_states) == config.n_layer + 1
    pool.run(2, predict_on_ranks, run, 2, args, rows, logits, env=True)
