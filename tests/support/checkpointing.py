"""Policies of selective activation checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from support.float64 import lifted_casts

aten = torch.ops.aten
_PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default)


def products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save matrix products and recompute cheap operations, as most guides suggest."""
    return CheckpointPolicy.MUST_SAVE if op in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def collectives(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Save the outputs of collectives, so that recomputation repeats no communication."""
    sent = op.namespace == "oslo"
    return CheckpointPolicy.MUST_SAVE if sent else CheckpointPolicy.PREFER_RECOMPUTE


def everything(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


POLICIES: dict[str, Callable[..., CheckpointPolicy]] = {
    policy.__name__: policy for policy in (products, collectives, everything)
}


def checkpoint_selectively(model: Any, policy: str) -> None:
    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, recomputation = create_selective_checkpoint_contexts(POLICIES[policy])

        @contextmanager
        def lifted() -> Iterator[None]:  # the mode around a backward pass is not active while it recomputes
            with recomputation, lifted_casts():
                yield

        return forward, lifted()

    options = {"use_reentrant": False, "context_fn": contexts}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
