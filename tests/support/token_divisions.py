"""Models whose tokens are divided over ranks, by sequence or by context parallelism."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer

from oslo_models.layers import context_attention, context_parts, token_division
from oslo_models.layers.context_parts import ContextPart

from support import token_counts
from support.reference import Step, parallel_model

SEQUENCE, CONTEXT = "sequence_parallel", "context_parallel_size"
REPLICAS, COPIES = "replicas", "copies"
"""Ranks over which FSDP2 shards weights: replicas, or all ranks with the same weights."""


def sizes_of(division: str, n: int) -> dict[str, Any]:
    """Return the arguments of a model that divides its tokens over ``n`` ranks."""
    return {"tensor_parallel_size": n, SEQUENCE: True} if division == SEQUENCE else {CONTEXT: n}


def option_of(division: str, n: int) -> str:
    """Return the option as messages name it."""
    return f"{division}={sizes_of(division, n)[division]}"


def divided_model(division: str, step: Step, n: int, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    """Return this rank's part of a model that divides its tokens over ``n`` ranks."""
    arguments = {"tensor_parallel_size": 1, **sizes_of(division, n), **options}
    return parallel_model(step.name, step.config, step.weights, dtype=dtype, **arguments)


def fully_sharded(model: Any, over: str, blocks: bool = True) -> Any:
    """Shard each block and the rest of the model, or all weights at once, with FSDP2, which refuses scalars."""
    mesh = model.mesh.dp_cp_mesh if over == COPIES else model.mesh.device_mesh["dp"]
    scalars = {param for param in model.parameters() if not param.dim()}
    for module in [*model.modules()] if blocks else ():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh, ignored_params=scalars)


def counting(division: str) -> AbstractContextManager[Counter[str]]:
    """Count the collectives along tokens."""
    return counting_exchanges() if division == CONTEXT else token_counts.counting()


def is_divided(counts: Counter[str]) -> bool:
    """Return whether a model with these collectives divided its tokens. A model with whole tokens gathers, too."""
    return any(counts[name] for name in ("exchange", "sum", "reduce_scatter"))


@contextlib.contextmanager
def counting_exchanges() -> Iterator[Counter[str]]:
    """Count exchanges of heads, gathers of tokens inside of blocks, and sums of gradients."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    def full(part: ContextPart, why: str = "") -> Tensor:
        counts["gather"] += part.state.is_inside
        return gathered(part, why)

    gathered = ContextPart.full
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_attention, "exchange", counted("exchange", context_attention.exchange))
        patch.setattr(context_parts, "reduce_fresh", counted("sum", context_parts.reduce_fresh))
        patch.setattr(ContextPart, "full", full)
        yield counts


@contextlib.contextmanager
def dividing_short_prompts() -> Iterator[Counter[str]]:
    """Divide prompts of at least two tokens, and count exchanges and gathers inside of blocks."""
    with pytest.MonkeyPatch.context() as patch, counting_exchanges() as counts:
        patch.setattr(token_division, "LEAST_PROMPT", 2)
        yield counts
