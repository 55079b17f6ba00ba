"""Rotary position embedding of queries and keys in one launch. This variant pairs the two halves of a head.

Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, tl, wide
from oslo_kernels.operation import operation


def turn(x: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """`rotary` of queries or keys, in plain torch."""
    rest = x[..., cos.shape[-1] :]
    h, c, s = (part.to(wide(x.dtype)) for part in (x[..., : cos.shape[-1]], cos.unsqueeze(1), sin.unsqueeze(1)))
    one, two = (h * s if backward else h).chunk(2, -1)
    turned = torch.cat((two, -one) if backward else (-two, one), -1)
    turned = (h * c + (turned if backward else turned * s)).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def reference(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """`rotary` in plain torch."""
    return turn(query, cos, sin, backward), turn(key, cos, sin, backward)


@operation("oslo::rotary", "b h l w", "b g l w", "b? l t<w", "b? l t")
def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    """Compute ``x * cos + rotate_half(x) * sin`` of queries and keys.

    With ``backward``, the inputs are the gradients of the results, and the outputs are the gradients of queries and
    keys.

    Args:
        query, key: ``[batch, heads, length, width]``. The numbers of heads may differ. The last stride is 1, the others
            are arbitrary.
        cos, sin: ``[batch or 1, length, turned]``, without gradients. The elements of a head after the first ``turned``
            are copied.
    """
    return reference(query, key, cos, sin, backward)


@rotary.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool = False) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, cos, sin, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
    return *rotary(of_query, of_key, *ctx.saved_tensors, not ctx.backward), None, None, None


rotary.register_autograd(_backward, setup_context=_setup)


@jit
def _turn(
    x_ptr, y_ptr, cos_ptr, sin_ptr, table, x_head, y_head, heads, first,
    HALF: tl.constexpr, REST: tl.constexpr, BACKWARD: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):  # fmt: skip
    head = (first * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads) & (d < HALF)
    c1 = tl.load(cos_ptr + table + d, mask=d < HALF).to(tl.float32)
    c2 = tl.load(cos_ptr + table + HALF + d, mask=d < HALF).to(tl.float32)
    s1 = tl.load(sin_ptr + table + d, mask=d < HALF).to(tl.float32)
    s2 = tl.load(sin_ptr + table + HALF + d, mask=d < HALF).to(tl.float32)
    x = x_ptr + head * x_head + d
    x1 = tl.load(x, mask=inside).to(tl.float32)
    x2 = tl.load(x + HALF, mask=inside).to(tl.float32)
    y = y_ptr + head * y_head + d
    if BACKWARD:
        tl.store(y, x1 * c1 + x2 * s2, mask=inside)
        tl.store(y + HALF, x2 * c2 - x1 * s1, mask=inside)
    else:
        tl.store(y, x1 * c1 - x2 * s1, mask=inside)
        tl.store(y + HALF, x2 * c2 + x1 * s2, mask=inside)
    if REST > 0:
        r = tl.arange(0, REST_BLOCK)[None, :]
        there = (head < heads) & (r < REST)
        rest = tl.load(x_ptr + head * x_head + 2 * HALF + r, mask=there)
        tl.store(y_ptr + head * y_head + 2 * HALF + r, rest, mask=there)


@jit
def rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    q_out_batch, q_out_head, q_out_position, k_out_batch, k_out_head, k_out_position,
    table_batch, length, q_heads, k_heads, q_programs, HALF: tl.constexpr, REST: tl.constexpr, BACKWARD: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
):  # fmt: skip
    batch = (tl.program_id(0) // length).to(tl.int64)
    position = (tl.program_id(0) % length).to(tl.int64)
    program = tl.program_id(1)
    table = table_batch * batch + position * (2 * HALF)
    if program < q_programs:
        q = q_ptr + batch * q_batch + position * q_position
        out = q_out_ptr + batch * q_out_batch + position * q_out_position
        _turn(q, out, cos_ptr, sin_ptr, table, q_head, q_out_head, q_heads, program,
              HALF, REST, BACKWARD, HEADS, BLOCK, REST_BLOCK)  # fmt: skip
    else:
        k = k_ptr + batch * k_batch + position * k_position
        out = k_out_ptr + batch * k_out_batch + position * k_out_position
        _turn(k, out, cos_ptr, sin_ptr, table, k_head, k_out_head, k_heads, program - q_programs,
              HALF, REST, BACKWARD, HEADS, BLOCK, REST_BLOCK)  # fmt: skip


@rotary.register_kernel("cuda")
def rotary_triton(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool = False
) -> tuple[Tensor, Tensor]:
    batch, q_heads, length, width = query.shape
    k_heads, turned = key.shape[1], cos.shape[-1]
    strided = query.stride(-1) != 1 or key.stride(-1) != 1
    if query.dtype == torch.float64 or strided or turned % 2 or not (query.numel() and key.numel()):
        return reference(query, key, cos, sin, backward)
    cos, sin, out = cos.contiguous(), sin.contiguous(), (torch.empty_like(query), torch.empty_like(key))
    table_batch = cos.stride(0) if len(cos) > 1 else 0
    block = power_of_two(turned // 2, 1 << 20)
    together = power_of_two(max(q_heads, k_heads), max(1, 4096 // block))
    strides = [stride for x in (query, key, *out) for stride in x.stride()[:3]]
    q_programs, k_programs = -(-q_heads // together), -(-k_heads // together)
    flags = {"HALF": turned // 2, "REST": width - turned, "BACKWARD": backward, "HEADS": together, "BLOCK": block}
    flags["REST_BLOCK"] = power_of_two(width - turned, 1 << 20)
    sizes = (table_batch, length, q_heads, k_heads, q_programs)
    grid = (batch * length, q_programs + k_programs)
    launch(rotary_kernel, grid, query, key, cos, sin, *out, *strides, *sizes, **flags)
    return out
