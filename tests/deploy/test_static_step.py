"""Decoding steps of fixed shapes, as CUDA graphs replay them, computed here without a capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oslo_models import registry
from oslo_models.deploy.running_batch import graphs, static_step, step_runner
from oslo_models.deploy.running_batch.graphs import GRAPHED
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.static_step import Compute
from oslo_models.deploy.running_batch.step_runner import StepRunner

from support import running
from support.float64 import lifted_casts

WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "lift_fresh", "item")
"""Operations for which the host waits for a GPU, or that copy to it: a capture allows neither."""


class Watched(TorchDispatchMode):
    """Counts operations by name; raises for those that a capture does not allow."""

    def __init__(self, forbids: bool = True) -> None:
        super().__init__()
        self.forbids, self.counts = forbids, dict[str, int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2].rstrip("_")
        self.counts[name] = self.counts.get(name, 0) + 1
        if self.forbids and name.lstrip("_") in {each.lstrip("_") for each in WAITS}:
            raise RuntimeError(f"{name}: operation not permitted when stream is capturing")
        return func(*args, **(kwargs or {}))


def watched(compute: Compute) -> Compute:
    """In place of a capture: the computation, which raises where a capture would."""
    compute()  # warms up

    def replay() -> Tensor:
        with Watched():
            return compute()

    return replay


class Both:
    """A runner with steps of fixed shapes beside one without, whose logits it has to compute."""

    def __init__(self, model: Any, limits: BatchLimits) -> None:
        self.model, self.eager, self.static = model, StepRunner(model, limits), static_runner(model, limits)
        self.buckets: set[tuple[int, int]] = set()

    def run(self, step: Any) -> Tensor | None:
        expected, found = self.eager.run(step), self.static.run(step)
        assert self.static.static is not None
        self.buckets |= set(self.static.static._steps)
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        return found


def static_runner(model: Any, limits: BatchLimits, capture: Callable[[Compute], Compute] = watched) -> StepRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_runner, "capture_of", lambda model: (capture, ""))
        return StepRunner(model, limits)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets of 8, 16, 32, ... columns, and rows that move early."""
    monkeypatch.setattr(static_step, "rounded_length", lambda length: max(8, 1 << (length - 1).bit_length()))
    monkeypatch.setattr(static_step, "SPARE_COLUMNS", 2)


@pytest.mark.usefixtures("short")
@pytest.mark.parametrize(
    ("variant", "fused"),
    # fused experts look at the tokens, but on CPUs only
    [
        (variant, fused)
        for variant in sorted(GRAPHED)
        for fused in (False, True)
        if (variant, fused) != ("mixtral", True)
    ],
)
def test_padded_steps_compute_the_logits_of_the_eager_ones(
    tmp_path: Path, seed: int, variant: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so the tokens that transformers generates for each call by itself."""
    name, calls, expected = running.checked(variant, tmp_path, seed, 12)
    cls: Any = registry.find(name)
    model = cls.from_pretrained_with_parallel(tmp_path, dtype=torch.float64).eval()
    assert graphs.reason_of_model(model) is None
    if fused:
        model.fuse(measure=False)
    runners: list[Both] = []

    def both(model: Any, limits: BatchLimits) -> Both:
        runners.append(Both(model, limits))
        return runners[-1]

    monkeypatch.setattr(running, "StepRunner", both)
    with lifted_casts(), torch.no_grad():
        found = running.together(model, calls, random.Random(seed), BatchLimits(rows=6, length=32, chunk=4))
    for mine, right in zip(found, expected, strict=True):
        assert mine is None or torch.equal(mine, right)
    assert len({rows for rows, _ in runners[0].buckets}) > 1 and len({columns for _, columns in runners[0].buckets}) > 1
