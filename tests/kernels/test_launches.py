"""Numbers of kernel launches, counted on fake tensors without a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from oslo_kernels import (
    cross_entropy,
    float8,
    full_norm_rotary,
    gated,
    language,
    long_norm,
    norm,
    norm_and_turn,
    normed_rotary,
    rotary,
    sums,
)
from oslo_models.distributed.mesh import Axis
from oslo_models.fusion import float8 as fused_float8
from oslo_models.fusion import linear_cross_entropy
from oslo_models.layers.cross_entropy import VocabShard


class Launches(TorchDispatchMode):
    """Records computing operations; views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and "empty" not in func.__name__:
            self.names.append(func.__name__)
        return out


@contextmanager
def counted() -> Iterator[list[str]]:
    """Record launched operations in order, and kernels by their names."""
    launches = Launches()

    def note(kernel: Any, *args: Any, **kwargs: Any) -> None:
        launches.names.append(kernel.__name__)

    with ExitStack() as stack:
        for module in (cross_entropy, float8, full_norm_rotary, gated, long_norm, norm, norm_and_turn, rotary, sums):
            stack.enter_context(mock.patch.object(module, "launch", note))
        stack.enter_context(mock.patch.object(cross_entropy, "triton", language))
        stack.enter_context(launches)
        yield launches.names


def test_a_chunk_of_head_and_loss_launches_five_kernels() -> None:
    shard = VocabShard(Axis.alone("tp"), (0, 501), 501)
    rule = cross_entropy.Rule(padded=True, cap=30.0, scale=0.5)
    counts = []
    for rows in (8, 16):
        with FakeTensorMode(), mock.patch.object(linear_cross_entropy, "_rows_at_once", return_value=8):
            hidden, weight = torch.empty(rows, 64, device="cuda"), torch.empty(501, 64, device="cuda")
            target = torch.empty(rows, dtype=torch.long, device="cuda")
            with counted() as launched:
                linear_cross_entropy._run(hidden, weight, None, target, None, shard, rule, (True, True, False))
        counts.append(list(launched))
    assert len(counts[1]) - len(counts[0]) == 5, counts
    kernels = [name for name in counts[1] if name.endswith("kernel")]
    assert kernels == ["statistics_kernel", "gradient_kernel"] * 2


@pytest.mark.parametrize("width", [64, norm.LONGEST + 64])
def test_launches_of_operations(width: int) -> None:
    with FakeTensorMode():
        x, residual, weight = (torch.empty(*shape, device="cuda") for shape in ((8, width), (8, width), (width,)))
        q, k = torch.empty(1, 4, 8, 64, device="cuda"), torch.empty(1, 2, 8, 64, device="cuda")
        table, packed = torch.empty(1, 8, 32, device="cuda"), torch.empty(8, 128, device="cuda")
        cases: dict[str, tuple[Callable[[], Any], int]] = {
            "norm": (lambda: norm.add_norm_triton(x, residual, weight, None, 1e-5, False), 1),
            "norm and sum": (lambda: norm.norm_add_triton(x, residual, weight, 1e-5), 1),
            "sum of three": (lambda: sums.sum_of_three_triton(x, residual, x), 1),
            "rotary": (lambda: rotary.rotary_triton(q, k, table, table), 1),
            "packed": (lambda: gated.gated_packed_triton(packed), 1),
            "packed backward": (lambda: gated.gated_packed_backward_triton(x.narrow(1, 0, 64), packed), 1),
        }
        statistics = torch.empty(2, 8, 1, device="cuda")
        # a kernel, or two for long rows, and the sum of the weight's partial gradients
        own = 1 + (width > norm.LONGEST)
        whole, heads = torch.empty(1, 8, 64, device="cuda"), torch.empty(64, device="cuda")
        normed = (q, k, whole, whole, heads, heads)
        cases["norms of heads and rotary"] = (lambda: normed_rotary.normed_rotary_triton(*normed, 1e-5), 1)
        cases["norms of heads and rotary backward"] = (  # and a sum for each of two weights
            lambda: normed_rotary.normed_rotary_backward_triton(q, k, *normed, torch.empty(1, 8, 6, device="cuda")), 3
        )  # fmt: skip
        cases["norm backward"] = (
            lambda: norm.add_norm_backward_triton(x, residual, residual, statistics, weight, False, 0.0, False), 1 + own
        )  # fmt: skip
        all_heads = (q, k, whole, whole, torch.empty(256, device="cuda"), torch.empty(128, device="cuda"))
        totals = torch.empty(1, 8, 2, device="cuda")
        given = (*all_heads, totals, 512, 256, 1e-5)
        cases["sums over heads"] = (lambda: full_norm_rotary.row_products_triton(q, q, k, k), 1)
        cases["norms over heads and rotary"] = (lambda: full_norm_rotary.full_norm_rotary_triton(*given), 1)
        cases["norms over heads and rotary backward"] = (  # and one sum for both weights
            lambda: full_norm_rotary.full_norm_rotary_backward_triton(q, k, *given[:7], totals, 512, 256, 1e-5), 2
        )  # fmt: skip
        for name, (run, expected) in cases.items():
            with counted() as launched:
                run()
            assert len(launched) == expected, (name, launched)


@pytest.mark.parametrize(("rowwise", "casts", "total"), [(False, 4, 38), (True, 6, 79)])
def test_float8_casts_each_operand_in_one_launch(rowwise: bool, casts: int, total: int) -> None:
    """Forward and backward of a layer. The other launches compute scales, which are small.

    Torch copies the transpose. Four operations would cast an operand.
    """
    how = fused_float8.Float8(rowwise, Axis.alone("tp"), False, False)
    saved: list[Any] = []
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode())
        stack.enter_context(mock.patch.object(float8, "triton", language))
        stack.enter_context(mock.patch.object(float8, "is_plain", lambda x: True))
        x, weight = (torch.empty(rows, 128, device="cuda", dtype=torch.bfloat16) for rows in (64, 256))
        ctx: Any = SimpleNamespace(needs_input_grad=(True, True, False), save_for_backward=lambda *x: saved.extend(x))
        with counted() as launched:
            y = fused_float8._Product._forward(ctx, x, weight, how)
            ctx.saved_tensors = saved
            fused_float8._Product._backward(ctx, torch.empty_like(y))
    names = Counter(launched)
    assert names["cast_kernel"] == casts and names["linalg_vector_norm.default"] == (6 if rowwise else 3), names
    assert names["clone.default"] == 3 and len(launched) == total, names
