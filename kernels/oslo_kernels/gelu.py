"""Bias and GeLU (exact or tanh form) in one pass. The backward pass also sums the bias gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, rows_of, strips, tl, wide
from oslo_kernels.operation import operation


def reference(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Compute ``gelu(x + bias)``, at least in float32."""
    summed = x.to(wide(x.dtype))
    return F.gelu(summed if bias is None else summed + bias, approximate=approximate).to(x.dtype)


@operation("oslo::bias_gelu", "*s n", "n")
def bias_gelu(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Compute ``gelu(x + bias)``.

    Args:
        x: ``[..., N]``.
        bias: ``[N]``.
        approximate: ``"none"`` or ``"tanh"``, as for ``F.gelu``.
    """
    return reference(x, bias, approximate)


@operation("oslo::bias_gelu_backward", "*s n", "*s n", "n")
def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    """Compute the gradients of ``x`` and of the bias (an empty tensor without a bias)."""
    summed = x.to(wide(x.dtype))
    summed = summed if bias is None else summed + bias
    grad_x = torch.ops.aten.gelu_backward(grad.to(summed.dtype), summed, approximate=approximate)
    grad_bias = grad_x.new_empty(0) if bias is None else rows_of(grad_x).sum(0).to(bias.dtype)
    return grad_x.to(x.dtype), grad_bias


@bias_gelu.register_fake
def _(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return torch.empty_like(x)


@bias_gelu_backward.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    grad_x, grad_bias = bias_gelu_backward(grad, x, bias, ctx.approximate)
    return grad_x, None if bias is None else grad_bias, None


bias_gelu.register_autograd(_backward, setup_context=_setup)


@jit
def gelu_value(x, TANH: tl.constexpr):
    if TANH:
        y = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))  # (1 + tanh(u)) / 2 = sigmoid(2 u)
    else:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return y


@jit
def gelu_slope(x, TANH: tl.constexpr):
    if TANH:
        s = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        slope = s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        slope = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    return slope


@jit
def gelu_kernel(x_ptr, bias_ptr, out_ptr, stride, N, BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + n, mask=n < N).to(tl.float32)
    if BIAS:
        x += tl.load(bias_ptr + n, mask=n < N).to(tl.float32)
    tl.store(out_ptr + row * N + n, gelu_value(x, TANH), mask=n < N)


@jit
def gelu_backward_kernel(
    grad_ptr, x_ptr, bias_ptr, grad_x_ptr, partial_ptr, grad_stride, stride, rows, N, STRIPS,
    BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    strip = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    if BIAS:
        bias = tl.load(bias_ptr + n, mask=n < N).to(tl.float32)
    for row in range(strip, rows, STRIPS):
        wide_row = tl.cast(row, tl.int64)
        x = tl.load(x_ptr + wide_row * stride + n, mask=n < N).to(tl.float32)
        if BIAS:
            x += bias
        dx = tl.load(grad_ptr + wide_row * grad_stride + n, mask=n < N, other=0.0).to(tl.float32) * gelu_slope(x, TANH)
        tl.store(grad_x_ptr + wide_row * N + n, dx, mask=n < N)
        total += dx
    if BIAS:
        tl.store(partial_ptr + tl.cast(strip, tl.int64) * N + n, total, mask=n < N)


@bias_gelu.register_kernel("cuda")
def bias_gelu_triton(x: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    if x.dtype == torch.float64 or not x.numel():
        return reference(x, bias, approximate)
    matrix, out = rows_of(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, N = matrix.shape
    block = power_of_two(N, 1024)
    flags = {"BIAS": bias is not None, "TANH": approximate == "tanh", "BLOCK": block}
    given = matrix if bias is None else bias.contiguous()
    launch(gelu_kernel, (rows, -(-N // block)), matrix, given, out, matrix.stride(0), N, **flags)
    return out


@bias_gelu_backward.register_kernel("cuda")
def bias_gelu_backward_triton(grad: Tensor, x: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64 or not x.numel():
        return bias_gelu_backward.plain(grad, x, bias, approximate)
    matrix, grads, grad_x = rows_of(x), rows_of(grad), torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, N = matrix.shape
    block, count = power_of_two(N, 1024), rows if bias is None else strips(rows)
    partial = x.new_empty((count, N) if bias is not None else (0,), dtype=torch.float32)
    given = matrix if bias is None else bias.contiguous()
    flags = {"BIAS": bias is not None, "TANH": approximate == "tanh", "BLOCK": block}
    sizes = (grads.stride(0), matrix.stride(0), rows, N, count)
    launch(gelu_backward_kernel, (count, -(-N // block)), grads, matrix, given, grad_x, partial, *sizes, **flags)
    return grad_x, partial if bias is None else partial.sum(0).to(bias.dtype)
