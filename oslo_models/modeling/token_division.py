"""Refuses wrappers and options that do not support divided tokens (`layers.token_division`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from oslo_models.distributed.callers import fully_sharded_parameters, is_over_context, object_under_construction
from oslo_models.layers.context_parts import ContextParts
from oslo_models.layers.token_division import TokenDivision, keep_parts, loses_parts
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B


def check_wrappers(model: Any, division: TokenDivision) -> None:
    """Check that a call of a model with divided tokens is supported. Prepare modules of ``fully_shard``.

    Raises:
        ValueError: a wrapper or an option does not support it.
    """
    modules = list(nn.Module.modules(model))
    reasons = {
        "torch.compile of blocks": any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
        and "compiled code takes whole hidden states",
        f"schedule={model.schedule!r}": model.schedule != ONE_F_ONE_B
        and "the backward pass of linear layers gathers tokens",
    }
    for name, reason in reasons.items():
        if reason:
            raise ValueError(f"{division.option} cannot be used with {name}: {reason}; leave one of them out")
    if sharded := [module for module in modules if isinstance(module, FSDPModule) and loses_parts(module)]:
        _prepare_fully_sharded(model, division, sharded)


def _prepare_fully_sharded(model: Any, division: TokenDivision, modules: Sequence[nn.Module]) -> None:
    """Pass parts through modules of ``fully_shard``, and find the parameters that it shards over the cp axis.

    Raises:
        ValueError: its mesh mixes shards, or it wraps a part of a block.
    """
    over_context: list[tuple[nn.Module, str]] = []
    for module in modules:
        for owner, name, ranks in fully_sharded_parameters(module):
            if is_over_context(ranks, f"one {type(model).__name__}", model.mesh):
                over_context.append((owner, name))
    if isinstance(division, ContextParts):
        _require_whole_blocks(model, division)
        for owner, name in over_context:
            division.averaged.setdefault(owner, set()).add(name)
    for module in modules:
        keep_parts(module)


def _require_whole_blocks(model: nn.Module, division: ContextParts) -> None:
    """Raise ``ValueError`` if ``fully_shard`` wraps a part of a block: its parameters come after the block begins."""
    for block in filter(division.watches, nn.Module.modules(model)):
        for name, module in block.named_modules():
            if name and isinstance(module, FSDPModule):
                raise ValueError(
                    f"{division.option} cannot be used with fully_shard of {name}, a part of a "
                    f"{type(block).__name__}: shard whole blocks, fully_shard(block, mesh=...)"
                )


def refuse_deepspeed(division: TokenDivision) -> None:
    """Raise ``ValueError`` if a ``DeepSpeedEngine`` is being constructed."""
    if object_under_construction("DeepSpeedEngine") is not None:
        raise ValueError(
            f"{division.option} cannot be used with DeepSpeed: leave it out, or use DistributedDataParallel or torch's "
            "ZeroRedundancyOptimizer"
        )
