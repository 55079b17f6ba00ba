"""Residual and LayerNorm or root-mean-square norm in one pass: ``norm(x + residual)`` and ``x + residual``.

Sources: Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, rows_of, strips, tl, wide
from oslo_kernels.operation import operation

LONGEST = 1 << 13
"""Longer rows do not fit into one program and are left to plain torch."""


def reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_norm` in plain torch."""
    summed = x if residual is None else x + residual
    h = summed.to(wide(x.dtype))
    mean = h.mean(-1, keepdim=True) if centered else h.new_zeros((*h.shape[:-1], 1))
    scale = ((h - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (h - mean) * scale * weight
    y = y if bias is None else y + bias
    kept = x.new_empty(0) if residual is None else summed
    return y.to(x.dtype), kept, torch.stack((rows_of(mean), rows_of(scale)))


@operation("oslo::add_norm")
def add_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """``norm(x + residual) * weight + bias``.

    Args:
        x: ``[..., N]``, as ``residual``; ``weight`` and ``bias`` are ``[N]``.
        centered: a LayerNorm; otherwise a root-mean-square norm.

    Returns:
        The norm; the sum ``x + residual`` (empty without a residual); the mean (zero unless centered) and the scale of
        each row, ``[2, rows, 1]``.
    """
    return reference(x, residual, weight, bias, eps, centered)


@operation("oslo::add_norm_backward")
def add_norm_backward(
    grad: Tensor, grad_sum: Tensor | None, summed: Tensor, statistics: Tensor, weight: Tensor, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the sum (which ``x`` and ``residual`` share), of the weight and of the bias."""
    dtype = wide(summed.dtype)
    mean, scale = statistics.to(dtype)
    normed = (rows_of(summed).to(dtype) - mean) * scale
    dy = rows_of(grad).to(dtype)
    wdy = dy * weight
    dx = wdy - normed * (wdy * normed).mean(-1, keepdim=True)
    if centered:
        dx = dx - wdy.mean(-1, keepdim=True)
    dx = (dx * scale).view(summed.shape)
    dx = dx if grad_sum is None else dx + grad_sum
    return dx.to(summed.dtype), (dy * normed).sum(0).to(weight.dtype), dy.sum(0).to(weight.dtype)


@add_norm.register_fake
def _(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    summed = x.new_empty(0) if residual is None else torch.empty_like(x)
    return torch.empty_like(x), summed, x.new_empty((2, rows, 1), dtype=wide(x.dtype))


@add_norm_backward.register_fake
def _(
    grad: Tensor, grad_sum: Tensor | None, summed: Tensor, statistics: Tensor, weight: Tensor, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(summed), torch.empty_like(weight), torch.empty_like(weight)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, _, ctx.centered = inputs
    ctx.residual, ctx.bias = residual is not None, bias is not None
    ctx.save_for_backward(x if residual is None else output[1], output[2], weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    summed, statistics, weight = ctx.saved_tensors
    grad = torch.zeros_like(summed) if grad is None else grad
    dx, dweight, dbias = add_norm_backward(
        grad, grad_sum if ctx.residual else None, summed, statistics, weight, ctx.centered
    )
    return dx, dx if ctx.residual else None, dweight, dbias if ctx.bias else None, None, None


add_norm.register_autograd(_backward, setup_context=_setup)


@jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, statistics_ptr, x_stride, residual_stride, rows, N, eps,
    RESIDUAL: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + n, mask=n < N, other=0.0)
    if RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + n, mask=n < N, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * N + n, x, mask=n < N)
    h = x.to(tl.float32)
    mean = 0.0
    if CENTERED:
        mean = tl.sum(h, 0) / N
        tl.store(statistics_ptr + row, mean)
        h = tl.where(n < N, h - mean, 0.0)
    else:
        tl.store(statistics_ptr + row, 0.0)
    scale = tl.rsqrt(tl.sum(h * h, 0) / N + eps)
    tl.store(statistics_ptr + rows + row, scale)
    y = h * scale * tl.load(weight_ptr + n, mask=n < N).to(tl.float32)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N).to(tl.float32)
    tl.store(y_ptr + row * N + n, y, mask=n < N)


@jit
def norm_backward_kernel(
    grad_ptr, grad_sum_ptr, sum_ptr, statistics_ptr, weight_ptr, dx_ptr, partial_ptr,
    grad_stride, grad_sum_stride, sum_stride, rows, N, STRIPS,
    GRAD_SUM: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32)
    total_weight = tl.zeros((BLOCK,), tl.float32)
    total_bias = tl.zeros((BLOCK,), tl.float32)
    for row in range(strip, rows, STRIPS):
        wide_row = tl.cast(row, tl.int64)
        mean = tl.load(statistics_ptr + wide_row)
        scale = tl.load(statistics_ptr + rows + wide_row)
        h = tl.load(sum_ptr + wide_row * sum_stride + n, mask=n < N, other=0.0).to(tl.float32)
        normed = tl.where(n < N, (h - mean) * scale, 0.0)
        dy = tl.load(grad_ptr + wide_row * grad_stride + n, mask=n < N, other=0.0).to(tl.float32)
        wdy = dy * weight
        dx = wdy - normed * (tl.sum(wdy * normed, 0) / N)
        if CENTERED:
            dx -= tl.sum(wdy, 0) / N
        dx *= scale
        if GRAD_SUM:
            dx += tl.load(grad_sum_ptr + wide_row * grad_sum_stride + n, mask=n < N).to(tl.float32)
        tl.store(dx_ptr + wide_row * N + n, dx, mask=n < N)
        total_weight += dy * normed
        total_bias += dy
    tl.store(partial_ptr + tl.cast(strip, tl.int64) * N + n, total_weight, mask=n < N)
    tl.store(partial_ptr + tl.cast(STRIPS + strip, tl.int64) * N + n, total_bias, mask=n < N)


def warps(block: int, backward: bool = False) -> int:
    """The number of warps whose registers hold a row; in the backward pass they hold sums as well."""
    return max(4, min(16, block // (512 if backward else 1024)))


@add_norm.register_kernel("cuda")
def add_norm_triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    N = x.shape[-1]
    if x.dtype == torch.float64 or N > LONGEST or not x.numel():
        return reference(x, residual, weight, bias, eps, centered)
    matrix = rows_of(x)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    summed = x.new_empty(0) if residual is None else torch.empty_like(y)
    statistics = x.new_empty((2, len(matrix), 1), dtype=torch.float32)
    added, shift = matrix if residual is None else rows_of(residual), weight if bias is None else bias
    block = power_of_two(N, LONGEST)
    flags = {"RESIDUAL": residual is not None, "BIAS": bias is not None, "CENTERED": centered, "BLOCK": block}
    sizes = (matrix.stride(0), added.stride(0), len(matrix), N, eps)
    tensors = (matrix, added, weight.contiguous(), shift.contiguous(), y, summed, statistics)
    launch(norm_kernel, (len(matrix),), *tensors, *sizes, num_warps=warps(block), **flags)
    return y, summed, statistics


@add_norm_backward.register_kernel("cuda")
def add_norm_backward_triton(
    grad: Tensor, grad_sum: Tensor | None, summed: Tensor, statistics: Tensor, weight: Tensor, centered: bool
) -> tuple[Tensor, Tensor, Tensor]:
    N = summed.shape[-1]
    if summed.dtype == torch.float64 or N > LONGEST or not summed.numel():
        return add_norm_backward.plain(grad, grad_sum, summed, statistics, weight, centered)
    matrix, dy = rows_of(summed), rows_of(grad)
    more = dy if grad_sum is None else rows_of(grad_sum)
    dx, count = torch.empty_like(summed, memory_format=torch.contiguous_format), strips(len(matrix))
    partial = summed.new_empty((2, count, N), dtype=torch.float32)
    block = power_of_two(N, LONGEST)
    flags = {"GRAD_SUM": grad_sum is not None, "CENTERED": centered, "BLOCK": block}
    sizes = (dy.stride(0), more.stride(0), matrix.stride(0), len(matrix), N, count)
    tensors = (dy, more, matrix, statistics, weight.contiguous(), dx, partial)
    launch(norm_backward_kernel, (count,), *tensors, *sizes, num_warps=warps(block, backward=True), **flags)
    grads = partial.sum(1).to(weight.dtype)
    return dx, grads[0].clone(), grads[1].clone()
