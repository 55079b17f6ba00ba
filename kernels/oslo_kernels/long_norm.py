"""The kernels of `norm` for rows that exceed the registers of one program. They process a row in pieces.

The pieces of a row are read again while they are still in the cache.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oslo_kernels.language import jit, launch, tl

PIECE = 2048
"""Elements of a row that are processed at a time."""
COLUMNS = 256
"""Columns that one program sums over the rows."""


@jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, statistics_ptr, x_stride, residual_stride, rows, N, eps,
    offset, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr, AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    squares = tl.zeros((BLOCK,), tl.float32)
    kind = sum_ptr.dtype.element_ty
    for start in range(0, N, BLOCK):
        n = start + offsets
        h = tl.load(x_ptr + row * x_stride + n, mask=n < N, other=0.0).to(tl.float32)
        if RESIDUAL:
            h += tl.load(residual_ptr + row * residual_stride + n, mask=n < N, other=0.0).to(tl.float32)
            tl.store(sum_ptr + row * N + n, h.to(kind), mask=n < N)
            h = h.to(kind).to(tl.float32)
        total += h
        squares += h * h
    mean = 0.0
    variance = tl.sum(squares, 0) / N
    if CENTERED:
        mean = tl.sum(total, 0) / N
        squares = tl.zeros((BLOCK,), tl.float32)  # a difference of large sums would be rounded away
        for start in range(0, N, BLOCK):
            n = start + offsets
            h = tl.load(x_ptr + row * x_stride + n, mask=n < N, other=0.0).to(tl.float32)
            if RESIDUAL:
                h += tl.load(residual_ptr + row * residual_stride + n, mask=n < N, other=0.0).to(tl.float32)
                h = h.to(kind).to(tl.float32)
            h = tl.where(n < N, h - mean, 0.0)
            squares += h * h
        variance = tl.sum(squares, 0) / N
    scale = tl.rsqrt(variance + eps)
    tl.store(statistics_ptr + row, mean)
    tl.store(statistics_ptr + rows + row, scale)
    for start in range(0, N, BLOCK):
        n = start + offsets
        h = tl.load(x_ptr + row * x_stride + n, mask=n < N, other=0.0).to(tl.float32)
        if RESIDUAL:
            h += tl.load(residual_ptr + row * residual_stride + n, mask=n < N, other=0.0).to(tl.float32)
            h = h.to(kind).to(tl.float32)
        y = (h - mean) * scale * (tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32) + offset)
        if BIAS:
            y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)
        if AFTER:
            y += tl.load(residual_ptr + row * residual_stride + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + n, y, mask=n < N)


@jit
def row_backward_kernel(
    grad_ptr, grad_sum_ptr, sum_ptr, statistics_ptr, weight_ptr, dx_ptr, grad_stride, grad_sum_stride, sum_stride,
    rows, N, offset, GRAD_SUM: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mean = tl.load(statistics_ptr + row)
    scale = tl.load(statistics_ptr + rows + row)
    along = tl.zeros((BLOCK,), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, N, BLOCK):
        n = start + offsets
        h = tl.load(sum_ptr + row * sum_stride + n, mask=n < N, other=0.0).to(tl.float32)
        wdy = tl.load(grad_ptr + row * grad_stride + n, mask=n < N, other=0.0).to(tl.float32)
        wdy *= tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32) + offset
        along += wdy * (h - mean) * scale
        total += wdy
    mean_along = tl.sum(along, 0) / N
    mean_total = 0.0
    if CENTERED:
        mean_total = tl.sum(total, 0) / N
    for start in range(0, N, BLOCK):
        n = start + offsets
        h = tl.load(sum_ptr + row * sum_stride + n, mask=n < N, other=0.0).to(tl.float32)
        wdy = tl.load(grad_ptr + row * grad_stride + n, mask=n < N, other=0.0).to(tl.float32)
        wdy *= tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32) + offset
        dx = (wdy - (h - mean) * scale * mean_along - mean_total) * scale
        if GRAD_SUM:
            dx += tl.load(grad_sum_ptr + row * grad_sum_stride + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * N + n, dx, mask=n < N)


@jit
def weight_backward_kernel(
    grad_ptr, sum_ptr, statistics_ptr, partial_ptr, grad_stride, sum_stride, rows, N, STRIPS,
    BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total_weight = tl.zeros((BLOCK,), tl.float32)
    total_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(strip, rows, STRIPS):
        wide_row = tl.cast(row, tl.int64)
        mean = tl.load(statistics_ptr + wide_row)
        scale = tl.load(statistics_ptr + rows + wide_row)
        h = tl.load(sum_ptr + wide_row * sum_stride + n, mask=n < N, other=0.0).to(tl.float32)
        dy = tl.load(grad_ptr + wide_row * grad_stride + n, mask=n < N, other=0.0).to(tl.float32)
        total_weight += dy * (h - mean) * scale
        if BIAS:
            total_bias += dy
    tl.store(partial_ptr + tl.cast(strip, tl.int64) * N + n, total_weight, mask=n < N)
    if BIAS:
        tl.store(partial_ptr + tl.cast(STRIPS + strip, tl.int64) * N + n, total_bias, mask=n < N)


def backward(
    tensors: tuple[Tensor, ...], strides: tuple[int, ...], dx: Tensor, partial: Tensor, offset: float,
    flags: dict[str, Any],
) -> None:  # fmt: skip
    """Write the gradient of the sum and the partial weight and bias gradients, as `norm` does for short rows.

    Args:
        tensors: the gradient of the norm, the gradient of the sum, the sum, the statistics and the weight.
        strides: the row strides of the first three tensors.
        flags: ``GRAD_SUM`` and ``CENTERED``.
    """
    grad, _, summed, statistics, _ = tensors
    rows, N, count = len(summed), summed.shape[1], partial.shape[1]
    launch(
        row_backward_kernel, (rows,), *tensors, dx, *strides, rows, N, offset, num_warps=8, BLOCK=PIECE, **flags
    )  # fmt: skip
    sizes = (strides[0], strides[2], rows, N, count)
    grid = (count, -(-N // COLUMNS))
    given = (grad, summed, statistics, partial)
    launch(weight_backward_kernel, grid, *given, *sizes, num_warps=1, BIAS=len(partial) == 2, BLOCK=COLUMNS)
