"""Selective activation checkpointing: collectives must not change tensors that a policy saves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from support import zoo
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, Step, differences, parallel_model, reference_step, shard_differences

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


def check_policy(policy: str, step: Step, fuse: bool) -> None:
    """On each of two ranks: loss and gradients match one process without checkpointing."""
    model = parallel_model(step.name, step.config, step.weights, 2)
    if fuse:
        model.fuse()
    checkpoint_selectively(model, policy)
    with lifted_casts():
        loss = model(**step.batch).loss
        loss.backward()
    own = {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}
    lines = differences("loss", loss.detach(), step.value, TOLERANCE)
    lines += shard_differences(model, "gradient of", own, step.gradients, TOLERANCE)
    assert not lines, "\n".join(lines)


VARIANTS = ["gpt2", "llama", "gpt2 fused", "llama fused", "llama-one-kv", "t5"]
CASES = [(variant, policy) for variant in VARIANTS for policy in POLICIES if (variant, policy) != ("t5", "everything")]
"""T5 computes its position buckets in place, and torch refuses to save tensors that change in place."""


@pytest.mark.parametrize(("variant", "policy"), CASES)
def test_step_with_selective_checkpointing_matches_one_process(
    pool: Pool, variant: str, policy: str, seed: int
) -> None:
    variant, _, fused = variant.partition(" ")
    step = reference_step(zoo.lm_head(variant), zoo.config(variant, use_cache=False), seed)
    pool.run(2, check_policy, policy, step, bool(fused))
