"""Residuals after norms and of parallel blocks under `fuse`: one pass each, and exact against transformers."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from oslo_models.fusion import norms, parallel_blocks

from support import zoo
from support.float64 import lifted_casts
from support.fusion import LOGITS, as_on_a_gpu
from support.pool import Pool
from support.reference import Step, parallel_model, reference_step, step_differences

PASSES = {"cohere": 1, "codegen": 1, "exaone4": 2, "flex_olmo": 2, "gpt_neox": 1, "gptj": 1, "olmo2": 2, "phi": 1}
"""Number of fused passes that add a residual in a block, by architecture."""


def passes() -> dict[str, Any]:
    spies = {}
    for module, name in ((norms, "norm_add"), (parallel_blocks, "sum_of_three")):
        spies[name] = mock.patch.object(module, name, wraps=getattr(module, name))
    return spies


def check_step(step: Step, n: int, expected: int) -> None:
    """On every rank, compare the step with transformers, and count the passes that add residuals."""
    model = as_on_a_gpu(parallel_model(step.name, step.config, step.weights, n))
    spies = passes()
    with spies["norm_add"] as after, spies["sum_of_three"] as both:
        lines = step_differences(model, step, without=LOGITS)
    assert not lines, "\n".join(lines)
    assert after.call_count + both.call_count == expected
    rows = [row for row in model.fusion_report() if row.operation == "residual"]
    assert [row.fused for row in rows] == [bool(expected)], rows


def step_of(variant: str, seed: int, **options: Any) -> Step:
    return reference_step(zoo.lm_head(variant), zoo.config(variant, num_hidden_layers=2, **options), seed)


@pytest.mark.parametrize("variant", PASSES)
def test_residuals_match_transformers(variant: str, seed: int) -> None:
    check_step(step_of(variant, seed), 1, 2 * PASSES[variant])


@pytest.mark.parametrize("variant", ["gpt_neox", "olmo2"])
def test_residuals_on_two_ranks_match_transformers(pool: Pool, variant: str, seed: int) -> None:
    pool.run(2, check_step, step_of(variant, seed), 2, 2 * PASSES[variant])


def test_sequential_blocks_of_gpt_neox_are_left_unfused(seed: int) -> None:
    check_step(step_of("gpt_neox", seed, use_parallel_residual=False), 1, 0)


def test_hooks_see_the_norm_before_the_residual(seed: int) -> None:
    """With a hook, the norm runs separately."""
    step = step_of("olmo2", seed)
    model = parallel_model(step.name, step.config, step.weights, 1)
    batch = {key: step.batch[key] for key in ("input_ids", "attention_mask")}
    norm = as_on_a_gpu(model).model.layers[0].post_attention_layernorm
    found = []
    hook = norm.register_forward_hook(lambda module, args, output: found.append(output) or 2 * output)
    with lifted_casts(), torch.no_grad():
        fused = model(**batch).logits
        expected = model.unfuse()(**batch).logits
        hook.remove()
        assert not torch.allclose(expected, model(**batch).logits)
    assert len(found) == 2 and torch.allclose(fused, expected, rtol=1e-10, atol=1e-10)


def test_summands_of_different_kinds_take_torch() -> None:
    """An adapter's bias, or autocast, may widen a summand."""
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    with mock.patch.object(parallel_blocks, "sum_of_three") as both:
        assert parallel_blocks.add_both(x, x.float(), x).dtype == torch.float32
        assert parallel_blocks.add_both(x, x[:1], x).shape == x.shape
    assert not both.called
