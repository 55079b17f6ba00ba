"""Input-gradient all-reduces overlap with weight-gradient matrix products."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed import collectives
from oslo_models.layers import overlap

from support import zoo
from support.fusion import LOGITS
from support.pool import Pool
from support.reference import parallel_model, reference_step, step_differences


def check_step(step: Any, n: int) -> None:
    """On every rank: loss and gradients of several steps, and the order of their computation."""
    calls: list[str] = []
    model = parallel_model(step.name, step.config, step.weights, n)
    copied = copy.deepcopy(model)

    def noting(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return function(*args, **kwargs)

        return call

    def start(x: Tensor, **kwargs: Any) -> Any:
        work = real(x, **kwargs)
        if not kwargs.get("async_op"):
            return work
        calls.append("start")
        return mock.Mock(wait=noting("wait", work.wait))

    real, lines = dist.all_reduce, []
    with (
        mock.patch.object(overlap, "overlaps", lambda axis, x: True),
        mock.patch.object(collectives, "shared_memory_of", lambda axis: None),
        mock.patch.object(dist, "all_reduce", start),
        mock.patch.object(overlap, "_weight_gradient", noting("weight", overlap._weight_gradient)),
    ):
        for number, own in enumerate((model, model, copied)):  # the first step finds the sibling layers
            calls.clear()
            lines += step_differences(own, step, without=LOGITS)
            if number == 1:
                regions = ("start weight weight wait", "start weight weight weight wait")  # gate and up; q, k and v
                regions = ("start weight wait",) * 2 if "GPT2" in step.name else regions
                expected = " ".join(regions * step.config.num_hidden_layers)
                lines += [] if " ".join(calls) == expected else [f"order of calls: {calls}"]
            own.zero_grad()
    assert not lines, "\n".join(lines)


@pytest.mark.parametrize("variant", ["llama", "gpt2"])
def test_sums_of_gradients_overlap_the_weights_products(pool: Pool, variant: str, seed: int) -> None:
    step = reference_step(zoo.lm_head(variant), zoo.config(variant), seed)
    pool.run(2, check_step, step, 2)
