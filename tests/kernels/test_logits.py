"""The two C++ passes of the cross entropy over logits on a CPU, against plain torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oslo_kernels import cross_entropy, logits
from oslo_kernels.cross_entropy import Rule

from support.source_mistakes import mistake
from support.source_mistakes import threads as threads_of

pytestmark = pytest.mark.skipif(logits.unavailable_reason() is not None, reason="needs a C++ compiler")


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads_of(request.param, logits):
        yield request.param


def check(draw: random.Random) -> None:
    """Check random sizes with gaps between rows, targets on other ranks, ignored targets and label smoothing."""
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        rows, columns = draw.randint(1, 12), draw.choice([1, 7, 60, 1024, 2100])
        start = draw.randint(0, 5)
        rest = draw.choice([0.0, 0.1 / columns])
        rule = Rule(start, draw.choice([-100, start]), draw.uniform(0.5, 1), rest, factor=draw.choice([1.0, 1 / rows]))
        apart = 3 * torch.randn(rows, columns + 4, dtype=dtype)
        given, kept = apart[:, :columns], apart[:, columns:].clone()
        target = torch.randint(columns + 9, (rows,))
        target[0] = rule.ignore_index
        plain = given.clone()
        expected = cross_entropy.row_statistics_plain(plain, target, rule)
        found = cross_entropy.row_statistics(given, target, rule)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=50 * tolerance)
        losses = cross_entropy.replace_by_gradient_plain(plain, expected, target, rule)
        torch.testing.assert_close(
            cross_entropy.replace_by_gradient_(given, expected, target, rule), losses, rtol=tolerance, atol=tolerance
        )
        torch.testing.assert_close(given, plain, rtol=tolerance, atol=tolerance)
        assert torch.equal(apart[:, columns:], kept)


def test_passes_match_torch(threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    for number in range(20):
        check(random.Random(seed + number))


def test_logits_that_are_left_to_torch() -> None:
    usual = torch.ones(2, 3)
    assert logits.computes(usual) and logits.computes(usual.double())
    for other in (usual.bfloat16(), usual.T, usual[:0], usual.to("meta")):
        assert not logits.computes(other)
    assert not cross_entropy._is_in_cpp(usual, Rule(scale=0.5)) and not cross_entropy._is_in_cpp(usual, Rule(cap=1.0))


MISTAKES = [
    ("most = values > most ? values : most;", "most = values;"),
    ("found = x[i] > found ? x[i] : found;", ";"),
    ("plain += total(x + first, n)", "plain = total(x + first, n)"),
    ("column < 0 ? T(0) : x[column]", "x[column < 0 ? 0 : column]"),
    ("if (column == -2)", "if (column < 0)"),
    ("if (column >= 0) x[column] -= T(p.hit)", "x[column < 0 ? 0 : column] -= T(p.hit)"),
    ("part[i] -= rest", "part[i] += rest"),
    ("static_cast<T*>(p.logits) + row * p.stride", "static_cast<T*>(p.logits) + row * p.columns"),
]


@pytest.mark.parametrize(("right", "wrong"), MISTAKES)
def test_mistakes_are_caught(right: str, wrong: str, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    with mistake(logits, right, wrong, tmp_path), pytest.raises(AssertionError):
        for number in range(40):
            check(random.Random(seed + number))
