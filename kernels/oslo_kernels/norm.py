"""Residual and LayerNorm or root-mean-square norm in one pass: ``norm(x + residual)`` and ``x + residual``.

`norm_add` adds the residual after the norm.

Sources: Ba et al., "Layer Normalization", 2016; Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels import long_norm
from oslo_kernels.language import jit, launch, power_of_two, rows_of, strips, tl, wide
from oslo_kernels.operation import operation

LONGEST = 1 << 13
"""Longer rows do not fit into one program. The kernels of `long_norm` process them in pieces."""


def result_dtype(summed: torch.dtype, weight: torch.dtype, keeps_dtype: bool) -> torch.dtype:
    """Return the dtype of the norm: the dtype of the sum, or the promoted dtype of sum and weight."""
    return summed if keeps_dtype else torch.promote_types(summed, weight)


def reference(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`add_norm` in plain torch."""
    summed = x if residual is None else x + residual
    h = summed.to(wide(summed.dtype))
    mean = h.mean(-1, keepdim=True) if centered else h.new_zeros((*h.shape[:-1], 1))
    scale = ((h - mean).square().mean(-1, keepdim=True) + eps).rsqrt()
    y = (h - mean) * scale * (weight.to(h.dtype) + offset if offset else weight)
    y = y if bias is None else y + bias
    kept = x.new_empty(0) if residual is None else summed
    dtype = result_dtype(summed.dtype, weight.dtype, keeps_dtype)
    return y.to(dtype), kept, torch.stack((rows_of(mean), rows_of(scale)))


@operation("oslo::add_norm", "*s n", "*s n", "n", "n")
def add_norm(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``norm(x + residual) * (weight + offset) + bias``, at least in float32. Dtypes may differ.

    Args:
        x: ``[..., N]``, as ``residual``; ``weight`` and ``bias`` are ``[N]``.
        centered: compute a LayerNorm instead of a root-mean-square norm.
        offset: a number to add to the weight, as Gemma does.
        keeps_dtype: whether the norm keeps the dtype of the sum even if the weight has a wider dtype.

    Returns:
        The norm; the sum ``x + residual`` (empty without a residual); the mean (zero unless centered) and the scale of
        each row, ``[2, rows, 1]``.
    """
    return reference(x, residual, weight, bias, eps, centered, offset, keeps_dtype)


@operation("oslo::add_norm_backward", "*s n", "*s n", "*s n", "2 #s 1 !", "n")
def add_norm_backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    statistics: Tensor,
    weight: Tensor,
    centered: bool,
    offset: float = 0.0,
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the sum (shared by ``x`` and ``residual``), the weight, and the bias (empty if none)."""
    dtype = wide(summed.dtype)
    mean, scale = statistics.to(dtype)
    normed = (rows_of(summed).to(dtype) - mean) * scale
    dy = rows_of(grad).to(dtype)
    wdy = dy * (weight.to(dtype) + offset if offset else weight)
    dx = wdy - normed * (wdy * normed).mean(-1, keepdim=True)
    if centered:
        dx = dx - wdy.mean(-1, keepdim=True)
    dx = (dx * scale).view(summed.shape)
    dx = dx if grad_sum is None else dx + grad_sum
    dbias = dy.sum(0).to(weight.dtype) if bias else weight.new_empty(0)
    return dx.to(summed.dtype), (dy * normed).sum(0).to(weight.dtype), dbias


@add_norm.register_fake
def _(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.numel() // x.shape[-1]
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    summed = x.new_empty(0) if residual is None else torch.empty_like(x, dtype=dtype)
    y = torch.empty_like(x, dtype=result_dtype(dtype, weight.dtype, keeps_dtype))
    return y, summed, x.new_empty((2, rows, 1), dtype=wide(dtype))


@add_norm_backward.register_fake
def _(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    statistics: Tensor,
    weight: Tensor,
    centered: bool,
    offset: float = 0.0,
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(summed), torch.empty_like(weight), torch.empty_like(weight) if bias else weight.new_empty(0)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, bias, _, ctx.centered, ctx.offset, _ = inputs
    ctx.bias, ctx.dtypes = bias is not None, (x.dtype, None if residual is None else residual.dtype)
    ctx.save_for_backward(x if residual is None else output[1], output[2], weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    summed, statistics, weight = ctx.saved_tensors
    of_x, of_residual = ctx.dtypes
    grad = torch.zeros_like(summed) if grad is None else grad
    grad_sum = None if of_residual is None else grad_sum
    dx, dweight, dbias = add_norm_backward(
        grad, grad_sum, summed, statistics, weight, ctx.centered, ctx.offset, ctx.bias
    )
    more = (dweight, dbias if ctx.bias else None, None, None, None, None)
    return dx.to(of_x), None if of_residual is None else dx.to(of_residual), *more


add_norm.register_autograd(_backward, setup_context=_setup)


@jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, sum_ptr, statistics_ptr, x_stride, residual_stride, rows, N, eps,
    offset, RESIDUAL: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr, AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
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
    y = h * scale * (tl.load(weight_ptr + n, mask=n < N).to(tl.float32) + offset)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N).to(tl.float32)
    if AFTER:
        y += tl.load(residual_ptr + row * residual_stride + n, mask=n < N).to(tl.float32)
    tl.store(y_ptr + row * N + n, y, mask=n < N)


@jit
def norm_backward_kernel(
    grad_ptr, grad_sum_ptr, sum_ptr, statistics_ptr, weight_ptr, dx_ptr, partial_ptr,
    grad_stride, grad_sum_stride, sum_stride, rows, N, STRIPS, offset,
    GRAD_SUM: tl.constexpr, BIAS: tl.constexpr, CENTERED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + n, mask=n < N, other=0.0).to(tl.float32) + offset
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
        if BIAS:
            total_bias += dy
    tl.store(partial_ptr + tl.cast(strip, tl.int64) * N + n, total_weight, mask=n < N)
    if BIAS:
        tl.store(partial_ptr + tl.cast(STRIPS + strip, tl.int64) * N + n, total_bias, mask=n < N)


def warps(block: int, backward: bool = False) -> int:
    """Return the number of warps with enough registers for a row, and in the backward pass for the sums as well."""
    return max(4, min(16, block // (512 if backward else 1024)))


@add_norm.register_kernel("cuda")
def add_norm_triton(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    centered: bool,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    if dtype == torch.float64 or not x.numel():
        return reference(x, residual, weight, bias, eps, centered, offset, keeps_dtype)
    y = x.new_empty(x.shape, dtype=result_dtype(dtype, weight.dtype, keeps_dtype))
    summed = x.new_empty(0 if residual is None else x.shape, dtype=dtype)
    flags = {"RESIDUAL": residual is not None, "BIAS": bias is not None, "CENTERED": centered, "AFTER": False}
    statistics = _run(x, residual, (weight, weight if bias is None else bias), y, summed, eps, offset, flags)
    return y, summed, statistics


def _run(
    x: Tensor, residual: Tensor | None, params: tuple[Tensor, Tensor], y: Tensor, summed: Tensor, eps: float,
    offset: float, flags: dict[str, bool],
) -> Tensor:  # fmt: skip
    """Launch the forward kernel, which writes ``y`` and ``summed``. Return the statistics."""
    N, matrix = x.shape[-1], rows_of(x)
    statistics = x.new_empty((2, len(matrix), 1), dtype=torch.float32)
    added = matrix if residual is None else rows_of(residual)
    sizes = (matrix.stride(0), added.stride(0), len(matrix), N, eps, offset)
    tensors = (matrix, added, *(param.contiguous() for param in params), y, summed, statistics)
    if N > LONGEST:
        launch(long_norm.norm_kernel, (len(matrix),), *tensors, *sizes, num_warps=8, BLOCK=long_norm.PIECE, **flags)
    else:
        block = power_of_two(N, LONGEST)
        launch(norm_kernel, (len(matrix),), *tensors, *sizes, num_warps=warps(block), BLOCK=block, **flags)
    return statistics


@add_norm_backward.register_kernel("cuda")
def add_norm_backward_triton(
    grad: Tensor,
    grad_sum: Tensor | None,
    summed: Tensor,
    statistics: Tensor,
    weight: Tensor,
    centered: bool,
    offset: float = 0.0,
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    N = summed.shape[-1]
    if summed.dtype == torch.float64 or not summed.numel():
        return add_norm_backward.plain(grad, grad_sum, summed, statistics, weight, centered, offset, bias)
    matrix, dy = rows_of(summed), rows_of(grad)
    more = dy if grad_sum is None else rows_of(grad_sum)
    dx, count = torch.empty_like(summed, memory_format=torch.contiguous_format), strips(len(matrix))
    partial = summed.new_empty((1 + bias, count, N), dtype=torch.float32)
    flags: dict[str, Any] = {"GRAD_SUM": grad_sum is not None, "CENTERED": centered}
    strides = (dy.stride(0), more.stride(0), matrix.stride(0))
    tensors = (dy, more, matrix, statistics, weight.contiguous())
    if N > LONGEST:
        long_norm.backward(tensors, strides, dx, partial, offset, flags)
    else:
        block = power_of_two(N, LONGEST)
        sizes = (*strides, len(matrix), N, count, offset)
        flags |= {"BIAS": bias, "BLOCK": block}
        launch(norm_backward_kernel, (count,), *tensors, dx, partial, *sizes, num_warps=warps(block, True), **flags)
    grads = [part.sum(0).to(weight.dtype) for part in partial]
    return dx, grads[0], grads[1] if bias else weight.new_empty(0)


# The residual after the norm ------------------------------------------------------------------------------------------


@operation("oslo::norm_add", "*s n", "*s n", "n")
def norm_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, keeps_dtype: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute ``residual + norm(x) * (weight + offset)`` with a root-mean-square norm. For arguments see `add_norm`.

    Returns:
        The sum, and the statistics as in `add_norm`.
    """
    y, _, statistics = reference(x, None, weight, None, eps, False, offset, keeps_dtype)
    return residual + y, statistics


@norm_add.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, keeps_dtype: bool = False) -> Any:
    dtype = torch.promote_types(result_dtype(x.dtype, weight.dtype, keeps_dtype), residual.dtype)
    return torch.empty_like(x, dtype=dtype), x.new_empty((2, x.numel() // x.shape[-1], 1), dtype=wide(x.dtype))


def _setup_after(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, _, ctx.offset, _ = inputs
    ctx.dtype = residual.dtype
    ctx.save_for_backward(x, output[1], weight)


def _backward_after(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, statistics, weight = ctx.saved_tensors
    dx, dweight, _ = add_norm_backward(grad, None, x, statistics, weight, False, ctx.offset, False)
    return dx, grad.to(ctx.dtype), dweight, None, None, None


norm_add.register_autograd(_backward_after, setup_context=_setup_after)


@norm_add.register_kernel("cuda")
def norm_add_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0, keeps_dtype: bool = False
) -> Any:
    if torch.float64 in (x.dtype, residual.dtype) or not x.numel():
        return norm_add.plain(x, residual, weight, eps, offset, keeps_dtype)
    dtype = torch.promote_types(result_dtype(x.dtype, weight.dtype, keeps_dtype), residual.dtype)
    y = x.new_empty(x.shape, dtype=dtype)
    flags = {"RESIDUAL": False, "BIAS": False, "CENTERED": False, "AFTER": True}
    return y, _run(x, residual, (weight, weight), y, y, eps, offset, flags)
