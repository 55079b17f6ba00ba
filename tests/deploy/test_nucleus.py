"""Top-p and suppressed tokens in the running batch have the bits of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import (
    MinLengthLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TopPLogitsWarper,
)

from oslo_models.deploy.running_batch.nucleus import Nucleus, faster
from oslo_models.fusion.suppressed_tokens import suppression

IDS = torch.zeros(1, 3, dtype=torch.long)


def check(scores: torch.Tensor, **settings: Any) -> None:
    warper = TopPLogitsWarper(**settings)
    found = faster(warper)(IDS, scores.clone())
    assert torch.equal(found.view(torch.int32), warper(IDS, scores.clone()).view(torch.int32))


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0])
def test_bits_of_random_logits(seed: int, scale: float, top_p: float) -> None:
    for vocabulary in (1, 7, 101, 32000, 50257):
        generator = torch.Generator().manual_seed(seed + vocabulary)
        scores = torch.randn(1, vocabulary, generator=generator) * scale
        check(scores, top_p=top_p)
        check(scores.bfloat16().float(), top_p=top_p)  # with many equal ones
        check(scores.masked_fill(scores < scale, -float("inf")), top_p=top_p, min_tokens_to_keep=3)


VALUES = st.sampled_from([-float("inf"), -2.0, -0.0, 0.0, 0.5, 0.75, 1.0, 3.0, float("inf"), float("nan")])


@given(st.lists(VALUES, min_size=1, max_size=12), st.floats(0, 1), st.integers(1, 14))
@example([1.0, 1.0], 0.5, 1)
def test_bits_of_equal_and_special_values(values: list[float], top_p: float, least: int) -> None:
    check(torch.tensor([values]), top_p=top_p, min_tokens_to_keep=least)


def test_other_processors_and_logits_are_left_to_transformers() -> None:
    class Own(TopPLogitsWarper):
        pass

    own, warper = Own(0.5), TopPLogitsWarper(0.5)
    assert faster(own) is own and isinstance(faster(warper), Nucleus)
    for scores in (torch.randn(2, 9), torch.randn(1, 9, dtype=torch.float64)):
        assert torch.equal(faster(warper)(IDS, scores), warper(IDS, scores))


@given(st.lists(st.integers(-3, 12), max_size=6), st.booleans(), st.integers(0, 4), st.booleans())
def test_suppressed_tokens_have_the_bits_of_transformers(
    tokens: list[int], at_begin: bool, length: int, has_nan: bool
) -> None:
    """Tokens outside of the vocabulary suppress none."""
    own = SuppressTokensAtBeginLogitsProcessor(tokens, 2) if at_begin else SuppressTokensLogitsProcessor(tokens)
    scores = torch.randn(1, 10)
    scores[0, :2] = float("nan") if has_nan else -float("inf")
    ids = torch.zeros(1, length, dtype=torch.long)
    fast = suppression(own)
    for _ in range(2):
        assert repr(fast(ids, scores).tolist()) == repr(own(ids, scores).tolist())
    own.begin_index = 3
    assert repr(fast(ids, scores).tolist()) == repr(own(ids, scores).tolist())


def test_other_processors_are_not_replaced() -> None:
    class Other(SuppressTokensLogitsProcessor):
        pass

    assert suppression(Other([1])) is None and suppression(MinLengthLogitsProcessor(2, 1)) is None
