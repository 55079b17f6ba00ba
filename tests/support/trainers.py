"""Runs transformers' Trainer in float64 in one process, and on the ranks of a sharded model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor
from torch.utils.data import SequentialSampler
from transformers import PreTrainedConfig, TrainingArguments

from support.float64 import lifted_casts
from support.pipelines import model_on_stages, stage_differences, stage_parameters
from support.reference import TOLERANCE, full_parameters, reference_model

Rows = list[dict[str, list[int]]]

SIZES = {
    "tp=2": (2, 1, 2),
    "pp=2": (1, 2, 2),
    "dp=2": (1, 1, 2),
    "tp=2, dp=2": (2, 1, 4),
    "pp=2, dp=2": (1, 2, 4),
    "tp=2, pp=2": (2, 2, 4),
    "tp=2, pp=2, dp=2": (2, 2, 8),
}
"""The sizes of tp and pp, and the number of ranks."""

SHORT = {
    "use_cpu": True,
    "report_to": [],
    "disable_tqdm": True,
    "save_strategy": "no",
    "logging_steps": 1,
    "learning_rate": 1e-2,
    "max_steps": 5,
    "per_device_train_batch_size": 4,
}
"""Arguments of a short training run on CPUs that logs each step in its state only."""


def at_sizes(*quick: str) -> Any:
    """Run a test at all sizes; only the tests of the zoo run sizes other than the given ones."""
    cases = [size if size in quick else pytest.param(size, marks=pytest.mark.zoo) for size in SIZES]
    return pytest.mark.parametrize("sizes", cases)


def fresh_accelerate() -> None:
    """Reset the state of accelerate, which outlives a test in its worker and describes earlier processes."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def text_rows(config: PreTrainedConfig, seed: int, count: int, length: int = 7, masked: int = 2) -> Rows:
    """Return rows of tokens with up to ``2 * masked`` ignored labels."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, config.vocab_size, (count, length), generator=generator).tolist()
    return [
        {"input_ids": row, "attention_mask": [1] * length, "labels": [-100] * skipped + row[skipped:]}
        for row, skipped in ((row, i % (masked + 1) * 2) for i, row in enumerate(tokens))
    ]


def arguments(output_dir: Any, **options: Any) -> TrainingArguments:
    """Return the arguments of a short training run."""
    defaults = {**SHORT, "per_device_eval_batch_size": 4}
    return options.pop("cls", TrainingArguments)(str(output_dir), **{**defaults, **options})


class Ordered:
    """Keeps the order of rows: shuffled batches of one process, with another batch size, would hold other rows."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(train_dataset)


def watch(trainer: Any, steps: tuple[int, ...], parameters: Any) -> dict[int, dict[str, Tensor]]:
    """The parameters by step, filled while the trainer runs."""
    seen: dict[int, dict[str, Tensor]] = {}

    class Watch(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in steps:
                named = parameters(trainer.model).items()
                seen[state.global_step] = {name: param.detach().clone() for name, param in named}

    trainer.add_callback(Watch())
    return seen


@dataclass
class Run:
    """Results of a training run in one process.

    Attributes:
        teacher: weights of the model from which the trained one learns.
    """

    name: str
    config: PreTrainedConfig
    weights: dict[str, Tensor]
    logs: list[dict[str, float]] = field(default_factory=list)
    parameters: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    teacher: dict[str, Tensor] = field(default_factory=dict)


def in_float64(function: Any) -> Any:
    """Call ``function`` with float64 as the default dtype, also for the loss sums in Trainer."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with lifted_casts():
            return function()
    finally:
        torch.set_default_dtype(before)


def reference_run(
    name: str, config: PreTrainedConfig, seed: int, rows: Rows, args: TrainingArguments, cls: Any, **options: Any
) -> Run:
    """Train in one process with the transformers class."""
    fresh_accelerate()
    model = reference_model(name, config, seed)
    run = Run(name, config, full_parameters(model))
    trainer = type("Reference", (Ordered, cls), {})(model, args, train_dataset=rows, **options)
    run.parameters = watch(trainer, (1, 5), full_parameters)
    in_float64(trainer.train)
    run.logs = trainer.state.log_history
    return run


def rank_trainer(
    run: Run,
    tp: int,
    pp: int,
    args: Mapping[str, Any],
    rows: Rows,
    cls: Any,
    micro: int = 2,
    of_model: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a trainer of this rank's stage and shard of the same model. ``of_model``: arguments of its constructor."""
    fresh_accelerate()
    more = {**(of_model or {}), **({"micro_batch_size": micro} if pp > 1 else {})}
    model = model_on_stages(run.name, run.config, run.weights, tp, pp, **more)
    return type("Own", (Ordered, cls), {})(model, arguments(**args), train_dataset=rows, **options)


def differences_of_run(trainer: Any, run: Run) -> list[str]:
    """Train; return a line for each logged number and each parameter that differs from the single-process run."""
    seen = watch(trainer, (1, 5), stage_parameters)
    in_float64(trainer.train)
    logs = trainer.state.log_history
    lines = log_differences(logs, run.logs)
    if logs[-1]["total_flos"] != pytest.approx(run.logs[-1]["total_flos"], rel=1e-6):
        lines.append(f"total_flos {logs[-1]['total_flos']} instead of {run.logs[-1]['total_flos']}")
    for step, expected in run.parameters.items():
        lines += stage_differences(trainer.model, f"step {step}:", seen[step], expected, TOLERANCE)
    return lines


def log_differences(own_logs: list[dict[str, float]], expected_logs: list[dict[str, float]]) -> list[str]:
    """Return a line for each unexpected number, except for times and the last log."""
    lines = []
    for own, expected in zip(own_logs[:-1], expected_logs[:-1], strict=True):
        if own.keys() != expected.keys():
            lines.append(f"step {own['step']}: {sorted(own.keys() ^ expected.keys())}")
        # where the model is still its reference, all rewards are zero, and rounding decides which of two is larger
        tied = all(
            abs(expected.get(f"rewards/{which}", 1.0)) <= TOLERANCE for which in ("chosen", "rejected", "margins")
        )
        for key in (own.keys() & expected.keys()) - ({"rewards/accuracies"} if tied else set()):
            tolerance = TOLERANCE * max(1.0, abs(expected[key]))
            if "time" not in key and "per_second" not in key and not abs(own[key] - expected[key]) <= tolerance:
                lines.append(f"{key} in step {own['step']}: {own[key]} instead of {expected[key]}")
    return lines
