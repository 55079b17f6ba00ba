"""Norms and rotary positions on a CPU in one pass, with their gradients and gradients of gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oslo_kernels import passes

from support.source_mistakes import mistake
from support.source_mistakes import threads as threads_of

pytestmark = pytest.mark.skipif(passes.unavailable_reason() is not None, reason="needs a C++ compiler")
DTYPES = {torch.float64: 1e-12, torch.float32: 3e-5}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads_of(request.param, passes):
        yield request.param


def results(operation: Callable[..., Any], args: Sequence[Any], leaves: Sequence[Tensor], twice: bool) -> list[Tensor]:
    """Outputs, gradients of the leaves and, with ``twice``, gradients of these."""
    made = operation(*args)
    made = made if isinstance(made, tuple) else (made,)
    weights = [torch.arange(x.numel(), dtype=x.dtype).cos().view_as(x) for x in made]
    grads = torch.autograd.grad(made, leaves, weights, create_graph=twice)
    if not twice:
        return [*made, *grads]
    return [*made, *grads, *torch.autograd.grad(sum(x.pow(2).sum() for x in grads), leaves)]


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, right in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance * max(1.0, right.abs().max().item()))


def check_norms(draw: random.Random) -> None:
    for dtype, tolerance in DTYPES.items():
        rows, width = draw.randint(1, 40), draw.randint(1, 100)
        x, weight = torch.randn(2, rows, width, dtype=dtype), torch.randn(width, dtype=dtype)
        for wanted in ((True, True), (True, False), (False, True)):
            leaves = [each.clone().requires_grad_(one) for each, one in zip((x, weight), wanted, strict=True)]
            # also not dense
            args = (leaves[0].mT.contiguous().mT, leaves[1], 1e-5, draw.choice([0.0, 1.0]))
            needed = [each for each in leaves if each.requires_grad]
            for twice in (False, True)[: 1 + wanted[0]]:
                expected = results(passes.plain_rms_norm, args, needed, twice)
                assert_equal(results(passes.rms_norm, args, needed, twice), expected, tolerance)


def turned_first(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotation of transformers, of the first elements of each head."""
    width = cos.shape[-1]
    made = apply_rotary_pos_emb(query[..., :width], key[..., :width], cos, sin)
    query, key = (torch.cat((new, x[..., width:]), -1) for new, x in zip(made, (query, key), strict=True))
    return query, key


def squares(rotate: Callable[..., Any], *args: Tensor) -> tuple[Tensor, ...]:
    """Square the rotated tensors, so that gradients have gradients."""
    return tuple(x.pow(2) for x in rotate(*args))


def check_rotations(draw: random.Random) -> None:
    for dtype, tolerance in DTYPES.items():
        batch, length, turned = draw.randint(1, 4), draw.randint(1, 9), 2 * draw.randint(1, 20)
        rest = draw.choice([0, 3])
        counts = draw.randint(1, 5), draw.randint(1, 3)
        leaves = [torch.randn(batch, length, n, turned + rest, dtype=dtype, requires_grad=True) for n in counts]
        cos, sin = torch.randn(2, draw.choice([1, batch]), length, turned, dtype=dtype)
        args = (*(leaf.transpose(1, 2) for leaf in leaves), cos, sin)
        expected = results(turned_first, args, leaves, False)
        assert_equal(results(passes.rotate, args, leaves, False), expected, tolerance)
        expected = results(partial(squares, turned_first), args, leaves, True)
        assert_equal(results(partial(squares, passes.rotate), args, leaves, True), expected, 10 * tolerance)


def test_norms_match_torch(threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    for number in range(5):
        check_norms(random.Random(seed + number))


def test_rotations_match_transformers(threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    for number in range(5):
        check_rotations(random.Random(seed + number))


def test_computes_here() -> None:
    x, weight = torch.ones(2, 8), nn.Parameter(torch.ones(8))
    assert passes.computes(x, weight) and passes.computes(x.double(), weight.double())
    assert not passes.computes(x.half(), weight.half()) and not passes.computes(x, weight.double())
    assert not passes.computes(x[:0], weight) and not passes.computes(x.to("meta"), weight.to("meta"))
    seen = []
    torch.func.grad(lambda x: seen.append(passes.computes(x, weight)) or x.sum())(x)
    with forward_ad.dual_level():
        seen.append(passes.computes(x, weight))
    assert seen == [False, False]


MISTAKES = [
    ("p.width) * scale * scale / T(p.width)", "p.width) * scale / T(p.width)"),
    ("of_weight[i] += grad[i] * x[i] * scale", "of_weight[i] = grad[i] * x[i] * scale"),
    ("static_cast<T*>(p.of_weight) + thread * p.width", "static_cast<T*>(p.of_weight) + thread * (p.width - 1)"),
    ("out[i] = x[i] * scale * (weight[i] + offset)", "out[i] = x[i] * scale * weight[i]"),
    ("for (; i < width; ++i) total += x[i] * grad[i]", "for (; i < width - 1; ++i) total += x[i] * grad[i]"),
    ("small::rotate<double>(r, *heads, begin, end, p.is_backward)", "small::rotate<double>(r, *heads, begin, end)"),
]


@pytest.mark.parametrize(("right", "wrong"), MISTAKES)
def test_mistakes_are_caught(right: str, wrong: str, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    with threads_of(2, passes), mistake(passes, right, wrong, tmp_path), pytest.raises(AssertionError):
        for number in range(5):
            check_norms(random.Random(seed + number))
            check_rotations(random.Random(seed + number))
