"""Bias, dropout and residual in one pass. The mask is not stored: the backward pass recomputes it from the seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, rows_of, tl, wide
from oslo_kernels.operation import operation


def new_seed(device: torch.device) -> int:
    """Draw a seed from torch's default generator of a device. The generator advances.

    On GPUs the seed is a hash of the generator's seed and offset, which needs no synchronisation with the device.
    """
    if device.type != "cuda":
        return int(torch.randint(1 << 62, ()))
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    offset = generator.get_offset()
    generator.set_offset(offset + 4)
    return (generator.initial_seed() ^ (offset * 0x9E3779B97F4A7C15)) & ((1 << 62) - 1)


def keep_mask(x: Tensor, p: float, seed: int) -> Tensor:
    """Return the mask of kept elements in plain torch. The kernel draws a different mask from the same seed."""
    generator = torch.Generator(x.device).manual_seed(seed)
    return torch.rand(x.shape, generator=generator, device=x.device) >= p


def reference(x: Tensor, bias: Tensor | None, residual: Tensor, keep: Tensor, p: float) -> Tensor:
    """``residual + dropout(x + bias)`` with the mask ``keep``."""
    h = x.to(wide(x.dtype))
    h = h if bias is None else h + bias
    return (residual + torch.where(keep, h / (1.0 - p), 0.0)).to(x.dtype)


@operation("oslo::bias_dropout_residual", "*s n", "n", "*s n")
def bias_dropout_residual(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int) -> Tensor:
    """``residual + dropout(x + bias)``.

    Args:
        x: ``[..., N]``, as ``residual``; ``bias`` is ``[N]``.
        p: the probability that an element is dropped, below 1.
        seed: determines the mask; see `new_seed`.
    """
    return reference(x, bias, residual, keep_mask(x, p, seed), p)


@operation("oslo::dropout_backward", "*s n")
def dropout_backward(grad: Tensor, p: float, seed: int) -> Tensor:
    """Compute the gradient of ``x``. Its sum over the rows is the gradient of the bias."""
    return torch.where(keep_mask(grad, p, seed), grad / (1.0 - p), 0.0)


@bias_dropout_residual.register_fake
def _(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int) -> Tensor:
    return torch.empty_like(x)


@dropout_backward.register_fake
def _(grad: Tensor, p: float, seed: int) -> Tensor:
    return torch.empty_like(grad)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, bias, _, ctx.p, ctx.seed = inputs
    ctx.bias = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = dropout_backward(grad, ctx.p, ctx.seed)
    dbias = None if ctx.bias is None else rows_of(dx).sum(0, dtype=wide(dx.dtype)).to(ctx.bias)
    return dx, dbias, grad, None, None


bias_dropout_residual.register_autograd(_backward, setup_context=_setup)


@jit
def dropout_kernel(
    x_ptr, bias_ptr, residual_ptr, out_ptr, x_stride, residual_stride, N, p, seed,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, QUARTER: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (4 * QUARTER)
    lane = tl.arange(0, QUARTER)
    zero = tl.zeros((QUARTER,), tl.uint32)
    counter = (start + lane).to(tl.uint32)
    draws = tl.philox(seed, counter, zero + row.to(tl.uint32), zero + (row >> 32).to(tl.uint32), zero)
    scale = 1.0 / (1.0 - p)
    for i in tl.static_range(4):
        n = start + i * QUARTER + lane
        x = tl.load(x_ptr + row * x_stride + n, mask=n < N).to(tl.float32)
        if BIAS:
            x += tl.load(bias_ptr + n, mask=n < N).to(tl.float32)
        y = tl.where(tl.uint_to_uniform_float(draws[i]) >= p, x * scale, 0.0)
        if RESIDUAL:
            y += tl.load(residual_ptr + row * residual_stride + n, mask=n < N).to(tl.float32)
        tl.store(out_ptr + row * N + n, y, mask=n < N)


def _launch(x: Tensor, bias: Tensor | None, residual: Tensor | None, p: float, seed: int) -> Tensor:
    matrix, out = rows_of(x), torch.empty_like(x, memory_format=torch.contiguous_format)
    added, shift = matrix if residual is None else rows_of(residual), matrix if bias is None else bias.contiguous()
    rows, N = matrix.shape
    quarter = max(1, power_of_two(N, 4096) // 4)
    flags = {"BIAS": bias is not None, "RESIDUAL": residual is not None, "QUARTER": quarter}
    sizes = (matrix.stride(0), added.stride(0), N, p, seed)
    launch(dropout_kernel, (rows, -(-N // (4 * quarter))), matrix, shift, added, out, *sizes, **flags)
    return out


@bias_dropout_residual.register_kernel("cuda")
def bias_dropout_residual_triton(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: int) -> Tensor:
    if x.dtype == torch.float64 or not x.numel():
        return bias_dropout_residual.plain(x, bias, residual, p, seed)
    return _launch(x, bias, residual, p, seed)


@dropout_backward.register_kernel("cuda")
def dropout_backward_triton(grad: Tensor, p: float, seed: int) -> Tensor:
    if grad.dtype == torch.float64 or not grad.numel():
        return dropout_backward.plain(grad, p, seed)
    return _launch(grad, None, None, p, seed)
