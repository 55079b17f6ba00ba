"""Selective activation checkpointing: collectives must not change tensors that a policy saves."""

from __future__ import annotations

import pytest

from support import zoo
from support.checkpointing import POLICIES, checkpoint_selectively
from support.float64 import lifted_casts
from support.pool import Pool
from support.reference import TOLERANCE, Step, differences, parallel_model, reference_step, shard_differences


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
