"""Operations raise for wrong tensors before a kernel takes their addresses. No kernel is launched here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from oslo_kernels import dropout, full_norm_rotary, gated, gelu, ngrams, norm, normed_rotary, rotary, softmax, sums
from oslo_kernels.operation import Operation

B, H, G, L, W = 2, 4, 2, 3, 8
QUERY, KEY, TABLE = (B, H, L, W), (B, G, L, W), (B, L, W)
ROWS = (3, 5, W)
COLLECTIVES = {"all_reduce", "all_gather", "reduce_scatter", "symmetric_sum"}
"""Operations without kernels: they take no addresses."""
CALLS: dict[Operation, tuple[Any, ...]] = {
    dropout.bias_dropout_residual: (ROWS, (W,), ROWS, 0.5, 1),
    dropout.dropout_backward: (ROWS, 0.5, 1),
    full_norm_rotary.row_products: (QUERY, QUERY, KEY, KEY),
    full_norm_rotary.full_norm_rotary: (QUERY, KEY, TABLE, TABLE, (H * W,), (G * W,), (B, L, 2), 8, 8, 1e-5),
    full_norm_rotary.full_norm_rotary_backward: (
        *(QUERY, KEY, QUERY, KEY, TABLE, TABLE, (H * W,), (G * W,), (B, L, 2), (B, L, 2), 8, 8, 1e-5),
    ),
    gated.gated: (ROWS, ROWS, "silu"),
    gated.gated_backward: (ROWS, ROWS, ROWS, "silu"),
    gated.gated_packed: ((3, 2 * W), "silu"),
    gated.gated_packed_backward: ((3, W), (3, 2 * W), "silu"),
    gelu.bias_gelu: (ROWS, (W,), "none"),
    gelu.bias_gelu_backward: (ROWS, ROWS, (W,), "none"),
    norm.add_norm: (ROWS, ROWS, (W,), (W,), 1e-5, True),
    norm.add_norm_backward: (ROWS, ROWS, ROWS, (2, 15, 1), (W,), True),
    norm.norm_add: (ROWS, ROWS, (W,), 1e-5),
    normed_rotary.normed_rotary: (QUERY, KEY, TABLE, TABLE, (W,), (W,), 1e-5),
    normed_rotary.normed_rotary_backward: (QUERY, KEY, QUERY, KEY, TABLE, TABLE, (W,), (W,), (B, L, H + G)),
    rotary.rotary: (QUERY, KEY, (B, L, 6), (B, L, 6)),
    softmax.masked_softmax: ((B, H, L, L), (B, 1, L, L)),
    softmax.softmax_backward: ((B, H, L, L), (B, H, L, L), 1.0),
    sums.sum_of_three: (ROWS, ROWS, ROWS),
}
"""Right arguments, with shapes in place of tensors."""


MAY_DIFFER = {
    *((rotary.rotary, x, 1) for x in (0, 1)),
    *((normed_rotary.normed_rotary, x, 1) for x in (0, 1)),
    (softmax.masked_softmax, 0, 1),
    (gated.gated_packed, 0, 0),
    *((gelu.bias_gelu, 0, dim) for dim in (0, 1, -1)),
    *((dropout.dropout_backward, 0, dim) for dim in range(3)),
}
"""Dimensions of arguments, such as the number of heads, that the other arguments do not determine. -1: their number."""


class Launched(Exception):
    """A kernel would have taken addresses."""


def wrong(operation: Operation, args: list[Any]) -> Iterator[tuple[str, int, Tensor]]:
    """Name one wrong tensor at a time, and its place."""
    alone = sum(isinstance(x, Tensor) for x in args) == 1
    for number, x in enumerate(args):
        if not isinstance(x, Tensor):
            continue
        for dim in range(x.dim()):
            if (operation, number, dim) not in MAY_DIFFER:
                yield f"size of dimension {dim}", number, torch.ones([n + (d == dim) for d, n in enumerate(x.shape)])
        for dtype in (torch.int64, torch.bool, torch.float8_e4m3fn):
            yield str(dtype), number, x.to(dtype)
        if not alone:
            yield "device", number, x.to("meta")
        if not alone and (operation, number, -1) not in MAY_DIFFER:
            yield "number of dimensions", number, x[None]
        if operation.shapes.texts[number].endswith("!"):
            yield "gaps", number, torch.ones(*x.shape[:-1], 2 * x.shape[-1])[..., ::2]


def test_each_operation_checks_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """One longer, moved or recast tensor raises before a launch, which begins with a change of the current device."""

    def begin(device: int) -> None:
        raise Launched

    monkeypatch.setattr(torch.cuda, "device", begin)
    found = torch._C._dispatch_get_all_op_names()
    names = {
        name.partition("::")[2].partition(".")[0]
        for name in found
        if name.startswith("oslo::") and not name.startswith("oslo::test_")
    }  # of other tests
    assert names - COLLECTIVES == {operation.op._name for operation in CALLS}
    for operation, shapes in CALLS.items():
        args = [torch.ones(each) if isinstance(each, tuple) else each for each in shapes]
        kernel = operation._kernels["cuda"]
        with pytest.raises(Launched):
            kernel(*args)
        for what, number, x in wrong(operation, args):
            try:
                kernel(*args[:number], x, *args[number + 1 :])
            except (ValueError, RuntimeError):
                continue
            except Launched:
                pass
            raise AssertionError(f"{operation.op._qualname}: wrong {what} of argument {number} is accepted")


def test_tensors_by_name_are_checked() -> None:
    with pytest.raises(ValueError, match=r"oslo::gated: argument 1 of shapes \[\(2, 3\), \(2, 4\)\] is not \[\*s n\]"):
        gated.gated._kernels["cuda"](torch.ones(2, 3), activation="silu", up=torch.ones(2, 4))


def test_ngrams_on_another_device_are_refused() -> None:
    """The compiled kernel takes bare addresses."""
    scores, ids = torch.zeros(2, 10), torch.ones(2, 5, dtype=torch.long)
    with pytest.raises(ValueError, match="a kernel reads tensors of one device, got cpu and meta"):
        ngrams.block_repeats_(scores, ids.to("meta"), 2)
