"""Refuses wrappers and options that do not support divided tokens (`layers.token_division`)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from oslo_models.distributed.callers import object_under_construction
from oslo_models.layers.token_division import TokenDivision
from oslo_models.sharding.pipeline_rules import ONE_F_ONE_B


def check_wrappers(model: Any, division: TokenDivision) -> None:
    """Check that a call of a model with divided tokens is supported.

    Raises:
        ValueError: a wrapper or an option does not support it.
    """
    modules = list(nn.Module.modules(model))
    reasons = {
        "FSDP2": any(isinstance(module, FSDPModule) for module in modules)
        and "its hooks at a block do not know which tokens a rank holds",
        "torch.compile of blocks": any(getattr(module, "_compiled_call_impl", None) is not None for module in modules)
        and "compiled code takes whole hidden states",
        f"schedule={model.schedule!r}": model.schedule != ONE_F_ONE_B
        and "the backward pass of linear layers gathers tokens",
    }
    for name, reason in reasons.items():
        if reason:
            raise ValueError(f"{division.option} cannot be used with {name}: {reason}; leave one of them out")


def refuse_deepspeed(division: TokenDivision) -> None:
    """Raise ``ValueError`` if a ``DeepSpeedEngine`` is being constructed."""
    if object_under_construction("DeepSpeedEngine") is not None:
        raise ValueError(
            f"{division.option} cannot be used with DeepSpeed: leave it out, or use DistributedDataParallel or torch's "
            "ZeroRedundancyOptimizer"
        )
