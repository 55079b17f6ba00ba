"""Products of float32 matrices in three bfloat16 parts: with the tile units of a processor, and in plain C++."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from oslo_kernels import build, split_product
from oslo_kernels.split_product import product

from support.source_mistakes import mistake
from support.source_mistakes import threads as threads_of

pytestmark = pytest.mark.skipif(
    build.unavailable_reason(split_product._library) is not None,
    reason="needs a C++ compiler that knows vectors of 64 bytes",
)
PLAIN = pytest.mark.parametrize(
    "plain",
    [
        True,
        pytest.param(
            False, marks=pytest.mark.skipif(split_product.unavailable_reason() is not None, reason="needs AMX")
        ),
    ],
    ids=["plain", "tiles"],
)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads_of(request.param, split_product):
        yield request.param


def drawn(rows: int, terms: int, by_rows: bool) -> Tensor:
    """Return a part of a larger matrix, dense along rows or columns, scaled by a random power of e."""
    x = torch.randn(rows, terms + 3) if by_rows else torch.randn(terms, rows + 3).T[:rows]
    return (x * torch.rand(()).mul(60).sub(30).exp())[:, :terms]


def exceeds(found: Tensor, exact: Tensor, size: Tensor, limit: float) -> bool:
    """Whether an error exceeds ``limit`` times ``size``, the sum of the absolute values of the summands."""
    return bool(((found - exact).abs() > limit * size).any())


def check(plain: bool, draw: random.Random, most: int = 150) -> None:
    """Check products of random sizes and strides: alone, with bias, into given memory, and added to its content."""
    for left_by_rows in (True, False):
        for right_by_rows in (True, False):
            few, many, K = draw.randint(1, most // 2), draw.randint(most // 2 + 32, most + 32), draw.randint(1, most)
            M, N = (many, few) if left_by_rows else (few, many)  # threads divide the longer one
            left, right = drawn(M, K, left_by_rows), drawn(N, K, right_by_rows)
            exact, size = left.double() @ right.double().T, left.double().abs() @ right.double().abs().T
            bias = torch.randn(N) * size.mean().float()
            memory = torch.randn(M, N + 5) * size.mean().float()
            out, before = memory[:, :N], memory.clone()
            # about 24 bits; sums in another order than torch's
            limit, what = 4e-7, f"{M} x {N} x {K}, {left_by_rows}, {right_by_rows}"
            assert not exceeds(product(left, right, plain=plain), exact, size, limit), what
            assert not exceeds(product(left, right, bias, plain=plain), exact + bias, size + bias.abs(), limit), what
            product(left, right, out_MN=out, add=True, plain=plain)
            assert not exceeds(out, exact + before[:, :N], size + before[:, :N].abs(), limit), what
            product(left, right, out_MN=out, plain=plain)
            assert not exceeds(out, exact, size, limit) and torch.equal(memory[:, N:], before[:, N:]), what


@PLAIN
def test_products_are_as_exact_as_float32(plain: bool, threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    for _ in range(4):
        check(plain, draw)


@PLAIN
def test_products_of_more_than_is_packed_at_a_time(plain: bool, threads: int, seed: int) -> None:
    torch.manual_seed(seed)
    for M, N, K in ((1060, 40, 33), (40, 300, 70), (33, 50, 1100)):
        left, right = drawn(M, K, True), drawn(N, K, False)
        exact, size = left.double() @ right.double().T, left.double().abs() @ right.double().abs().T
        assert not exceeds(product(left, right, plain=plain), exact, size, 4e-7)


@pytest.mark.skipif(split_product.unavailable_reason() is not None, reason="needs AMX")
def test_error_is_at_most_as_large_as_by_torch(seed: int) -> None:
    """Compare the mean over a matrix. Torch's own products by tiles do not change."""
    torch.manual_seed(seed)
    x, half = torch.randn(300, 700), torch.randn(256, 256).bfloat16()
    weight, squared = torch.randn(200, 700), half @ half
    exact = x.double() @ weight.double().T
    for _ in range(3):
        found = product(x, weight)
        assert torch.equal(half @ half, squared)
    assert (found - exact).pow(2).mean() < 1.2 * (x @ weight.T - exact).pow(2).mean()


@PLAIN
def test_infinities_nans_and_extremes_equal_torch(plain: bool) -> None:
    x = torch.eye(40)
    x[0, 0], x[1, 1], x[2, 2], x[3, 3] = float("inf"), float("nan"), torch.finfo(torch.float32).max, 1e-30
    bias, weight = torch.ones(33), torch.ones(33, 40)
    torch.testing.assert_close(product(x, weight, plain=plain), x @ weight.T, equal_nan=True)
    torch.testing.assert_close(product(x, weight, bias, plain=plain), x @ weight.T + bias, equal_nan=True)
    out = torch.zeros(40, 33)
    product(x, weight, out_MN=out, plain=plain)
    torch.testing.assert_close(out, x @ weight.T, equal_nan=True)
    assert torch.equal(product(x[2:], torch.eye(40), plain=plain), x[2:])  # each number is the sum of its parts


def test_empty_products(seed: int) -> None:
    assert torch.equal(product(torch.ones(3, 0), torch.ones(2, 0), plain=True), torch.zeros(3, 2))
    assert torch.equal(product(torch.ones(3, 0), torch.ones(2, 0), torch.ones(2), plain=True), torch.ones(3, 2))
    assert product(torch.ones(0, 4), torch.ones(2, 4), plain=True).shape == (0, 2)


def test_matrices_that_do_not_fit() -> None:
    fitting = torch.ones(32, 8)
    assert split_product.fits(fitting, torch.ones(8, 40).T)
    few, wide, strided = fitting[:31], fitting.double(), torch.ones(32, 8, 2)[..., 0]
    for other in (few, wide, strided, fitting[None], fitting.to("meta")):
        assert not split_product.fits(fitting, other) and not split_product.fits(other, fitting)


def test_unavailable_reason_names_the_missing_part() -> None:
    reasons, compiled = [], []
    for flags, error in (("flags: amx_bf16 amx_tile", 0), ("flags: avx2", 0), ("flags: amx_bf16 amx_tile", 1)):
        with (
            mock.patch.object(split_product.build, "processor", return_value=flags),
            mock.patch.object(split_product, "_library", return_value=(None, False, lambda error=error: error)) as made,
        ):
            reasons.append(split_product.unavailable_reason.__wrapped__())
        compiled.append(made.called)
    assert reasons[0] is None and "the processor has no" in reasons[1] and "does not permit" in reasons[2]
    assert compiled == [True, False, True]


MISTAKES = [
    ("strange |= (Words)(magnitude > 0x7f7fffffu)", "strange |= (Words)(magnitude > 0x7fffffffu)"),
    ("(Words)(magnitude < 0x7f7f8000u) & 0x8000u", "magnitude & 0u | 0x8000u"),
    ("parts[2] = as<Words>(rest - as<Floats>(parts[1]))", "parts[2] = parts[1]"),
    ("q = 0; p + q < kParts", "q = 0; p + q < kParts - 1"),
    ("if (by_rows != is_left)", "if (by_rows)"),
    ("half = by_rows ? kSide : kSide * of_term", "half = kSide"),
    ("const bool add = p.add || term", "const bool add = p.add"),
    ("kPanel && !add) return", "kPanel) return"),
    ("(as<Words>(rest) + round)", "(as<Words>(rest) + 0x18000u)"),
    ("p.out += mine.begin * (by_rows ? p.of_row : 1)", "p.out += mine.begin * (by_rows ? p.right.rows : 1)"),
    ("divided.data += mine.begin * divided.of_row", "divided.data += mine.begin * divided.of_term"),
]


@pytest.mark.drawn(5)
@pytest.mark.parametrize(("right", "wrong"), MISTAKES)
def test_mistakes_are_caught(right: str, wrong: str, tmp_path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    with threads_of(2, split_product), mistake(split_product, right, wrong, tmp_path), pytest.raises(AssertionError):
        for _ in range(3):
            check(True, random.Random(seed), most=90)
        test_infinities_nans_and_extremes_equal_torch(True)
        test_products_of_more_than_is_packed_at_a_time(True, 2, seed)
