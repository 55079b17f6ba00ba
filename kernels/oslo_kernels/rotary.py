"""Rotary position embedding in one pass, in the variant that pairs the first half of a head with the second.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, tl, wide
from oslo_kernels.operation import operation


def reference(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """`rotary` in plain torch."""
    h, c, s = (part.to(wide(x.dtype)) for part in (x, cos.unsqueeze(1), sin.unsqueeze(1)))
    one, two = (h * s if backward else h).chunk(2, -1)
    turned = torch.cat((two, -one) if backward else (-two, one), -1)
    return (h * c + (turned if backward else turned * s)).to(x.dtype)


@operation("oslo::rotary")
def rotary(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """``x * cos + rotate_half(x) * sin``, or with ``backward`` the gradient of ``x`` from that of the result.

    Args:
        x: ``[batch, heads, length, width]``; the last stride is 1, the others are arbitrary.
        cos, sin: ``[batch or 1, length, width]``; without gradients.
    """
    return reference(x, cos, sin, backward)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    return torch.empty_like(x)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, cos, sin, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    return rotary(grad, *ctx.saved_tensors, not ctx.backward), None, None, None


rotary.register_autograd(_backward, setup_context=_setup)


@jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr, x_batch, x_head, x_position, y_batch, y_head, y_position, table_batch,
    length, heads, HALF: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    position = (tl.program_id(0) % length).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (d < HALF)
    table = table_batch * batch + position * (2 * HALF) + d
    c1 = tl.load(cos_ptr + table, mask=d < HALF).to(tl.float32)
    c2 = tl.load(cos_ptr + table + HALF, mask=d < HALF).to(tl.float32)
    s1 = tl.load(sin_ptr + table, mask=d < HALF).to(tl.float32)
    s2 = tl.load(sin_ptr + table + HALF, mask=d < HALF).to(tl.float32)
    x = x_ptr + batch * x_batch + position * x_position + head * x_head + d
    x1 = tl.load(x, mask=inside).to(tl.float32)
    x2 = tl.load(x + HALF, mask=inside).to(tl.float32)
    y = y_ptr + batch * y_batch + position * y_position + head * y_head + d
    if BACKWARD:
        tl.store(y, x1 * c1 + x2 * s2, mask=inside)
        tl.store(y + HALF, x2 * c2 - x1 * s1, mask=inside)
    else:
        tl.store(y, x1 * c1 - x2 * s1, mask=inside)
        tl.store(y + HALF, x2 * c2 + x1 * s2, mask=inside)


@rotary.register_kernel("cuda")
def rotary_triton(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    batch, heads, length, width = x.shape
    if x.dtype == torch.float64 or x.stride(-1) != 1 or width % 2 or not x.numel():
        return reference(x, cos, sin, backward)
    cos, sin, y = cos.contiguous(), sin.contiguous(), torch.empty_like(x)
    table_batch = cos.stride(0) if len(cos) > 1 else 0
    block = power_of_two(width // 2, 1 << 20)
    together = power_of_two(heads, max(1, 4096 // block))
    strides = (*x.stride()[:3], *y.stride()[:3])
    flags = {"HALF": width // 2, "BACKWARD": backward, "HEADS": together, "BLOCK": block}
    grid = (batch * length, -(-heads // together))
    launch(rotary_kernel, grid, x, cos, sin, y, *strides, table_batch, length, heads, **flags)
    return y
