"""Root-mean-square norms of the heads of queries and keys together with their rotary positions, in one launch.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Su et al., "RoFormer: Enhanced Transformer
with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, strips, tl, wide
from oslo_kernels.norm import result_dtype
from oslo_kernels.operation import operation
from oslo_kernels.rotary import turn


def _split(statistics: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """The scales of queries and of keys, ``[batch, heads, length, 1]``, of those of all."""
    scales = statistics.transpose(1, 2).unsqueeze(-1)
    return scales[:, : query.shape[1]], scales[:, query.shape[1] :]


def reference(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """`normed_rotary` in plain torch."""
    made, scales = [], []
    for x, weight in ((query, query_weight), (key, key_weight)):
        h = x.to(wide(x.dtype))
        scale = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = h * scale * (weight.to(h.dtype) + offset)
        made.append(turn(normed, cos, sin).to(result_dtype(x.dtype, weight.dtype, keeps_dtype)))
        scales.append(scale.squeeze(-1))
    return made[0], made[1], torch.cat(scales, 1).transpose(1, 2).contiguous()


@operation("oslo::normed_rotary")
def normed_rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Each head's root-mean-square norm, times ``weight + offset``, with its rotary position.

    Args:
        query, key: ``[batch, heads, length, width]`` of one dtype, with heads of their own.
        cos, sin: ``[batch or 1, length, width]``; without gradients.
        query_weight, key_weight: ``[width]``, of one dtype.
        keeps_dtype: whether the results have the dtype of queries and keys even if that of the weights is wider.

    Returns:
        Queries and keys; and the scale of each head, ``[batch, length, query and key heads]``.
    """
    return reference(query, key, cos, sin, query_weight, key_weight, eps, offset, keeps_dtype)


@operation("oslo::normed_rotary_backward")
def normed_rotary_backward(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    statistics: Tensor,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and both weights, from those of the results."""
    both = zip((of_query, of_key), (query, key), (query_weight, key_weight), _split(statistics, query), strict=True)
    inputs, weights = [], []
    for grad, x, weight, scale in both:
        dtype = wide(x.dtype)
        dy, normed = turn(grad.to(dtype), cos, sin, True), x.to(dtype) * scale
        wdy = dy * (weight.to(dtype) + offset)
        inputs.append(((wdy - normed * (wdy * normed).mean(-1, keepdim=True)) * scale).to(x.dtype))
        weights.append((dy * normed).sum((0, 1, 2)).to(weight.dtype))
    return inputs[0], inputs[1], weights[0], weights[1]


@normed_rotary.register_fake
def _(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = result_dtype(query.dtype, query_weight.dtype, keeps_dtype)
    batch, heads, length, _ = query.shape
    statistics = query.new_empty((batch, length, heads + key.shape[1]), dtype=wide(query.dtype))
    return torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype), statistics


@normed_rotary_backward.register_fake
def _(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    statistics: Tensor,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = [torch.empty_like(x) for x in (query, key, query_weight, key_weight)]
    return made[0], made[1], made[2], made[3]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, ctx.offset, _ = inputs
    ctx.save_for_backward(*tensors, output[2])


def _backward(ctx: Any, of_query: Tensor, of_key: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, query_weight, key_weight = normed_rotary_backward(of_query, of_key, *ctx.saved_tensors, ctx.offset)
    return query, key, None, None, query_weight, key_weight, None, None, None


normed_rotary.register_autograd(_backward, setup_context=_setup)


@jit
def _norm_and_turn(
    x_ptr, y_ptr, cos_ptr, sin_ptr, weight_ptr, statistics_ptr, table, x_head, y_head, heads, first, eps, offset,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = first * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (d < HALF)
    x = x_ptr + head[:, None].to(tl.int64) * x_head + d
    x1 = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)
    tl.store(statistics_ptr + head, scale, mask=head < heads)
    w1 = tl.load(weight_ptr + d, mask=d < HALF).to(tl.float32) + offset
    w2 = tl.load(weight_ptr + HALF + d, mask=d < HALF).to(tl.float32) + offset
    x1 = x1 * scale[:, None] * w1
    x2 = x2 * scale[:, None] * w2
    c1 = tl.load(cos_ptr + table + d, mask=d < HALF).to(tl.float32)
    c2 = tl.load(cos_ptr + table + HALF + d, mask=d < HALF).to(tl.float32)
    s1 = tl.load(sin_ptr + table + d, mask=d < HALF).to(tl.float32)
    s2 = tl.load(sin_ptr + table + HALF + d, mask=d < HALF).to(tl.float32)
    y = y_ptr + head[:, None].to(tl.int64) * y_head + d
    tl.store(y, x1 * c1 - x2 * s1, mask=inside)
    tl.store(y + HALF, x2 * c2 + x1 * s2, mask=inside)


@jit
def normed_rotary_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, statistics_ptr,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    q_out_batch, q_out_head, q_out_position, k_out_batch, k_out_head, k_out_position,
    table_batch, length, q_heads, k_heads, q_programs, eps, offset,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // length, row % length
    program = tl.program_id(1)
    table = table_batch * batch + position * (2 * HALF)
    statistics = statistics_ptr + row * (q_heads + k_heads)
    if program < q_programs:
        q = q_ptr + batch * q_batch + position * q_position
        out = q_out_ptr + batch * q_out_batch + position * q_out_position
        _norm_and_turn(q, out, cos_ptr, sin_ptr, q_weight_ptr, statistics, table, q_head, q_out_head, q_heads,
                       program, eps, offset, HALF, HEADS, BLOCK)  # fmt: skip
    else:
        k = k_ptr + batch * k_batch + position * k_position
        out = k_out_ptr + batch * k_out_batch + position * k_out_position
        _norm_and_turn(k, out, cos_ptr, sin_ptr, k_weight_ptr, statistics + q_heads, table, k_head, k_out_head,
                       k_heads, program - q_programs, eps, offset, HALF, HEADS, BLOCK)  # fmt: skip


@jit
def _back(
    grad_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, weight_ptr, statistics_ptr, partial_ptr, first,
    grad_batch, grad_head, grad_position, x_batch, x_head, x_position, dx_batch, dx_head, dx_position,
    table_batch, length, heads, all_heads, rows, STRIPS, offset,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head = first * HEADS + tl.arange(0, HEADS)
    wide_head = head[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (d < HALF)
    w1 = tl.load(weight_ptr + d, mask=d < HALF).to(tl.float32) + offset
    w2 = tl.load(weight_ptr + HALF + d, mask=d < HALF).to(tl.float32) + offset
    total1 = tl.zeros((HEADS, BLOCK), tl.float32)
    total2 = tl.zeros((HEADS, BLOCK), tl.float32)
    for row in range(tl.program_id(0), rows, STRIPS):
        batch = tl.cast(row // length, tl.int64)
        position = tl.cast(row % length, tl.int64)
        table = table_batch * batch + position * (2 * HALF)
        c1 = tl.load(cos_ptr + table + d, mask=d < HALF).to(tl.float32)
        c2 = tl.load(cos_ptr + table + HALF + d, mask=d < HALF).to(tl.float32)
        s1 = tl.load(sin_ptr + table + d, mask=d < HALF).to(tl.float32)
        s2 = tl.load(sin_ptr + table + HALF + d, mask=d < HALF).to(tl.float32)
        grad = grad_ptr + batch * grad_batch + position * grad_position + wide_head * grad_head + d
        g1 = tl.load(grad, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(grad + HALF, mask=inside, other=0.0).to(tl.float32)
        dy1 = g1 * c1 + g2 * s2
        dy2 = g2 * c2 - g1 * s1
        scale = tl.load(statistics_ptr + tl.cast(row, tl.int64) * all_heads + head, mask=head < heads, other=0.0)
        x = x_ptr + batch * x_batch + position * x_position + wide_head * x_head + d
        n1 = tl.load(x, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        n2 = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        total1 += tl.where(inside, dy1 * n1, 0.0)
        total2 += tl.where(inside, dy2 * n2, 0.0)
        wdy1 = tl.where(inside, dy1 * w1, 0.0)
        wdy2 = tl.where(inside, dy2 * w2, 0.0)
        mean = (tl.sum(wdy1 * n1 + wdy2 * n2, 1) / (2 * HALF))[:, None]
        dx = dx_ptr + batch * dx_batch + position * dx_position + wide_head * dx_head + d
        tl.store(dx, (wdy1 - n1 * mean) * scale[:, None], mask=inside)
        tl.store(dx + HALF, (wdy2 - n2 * mean) * scale[:, None], mask=inside)
    partial = partial_ptr + tl.cast(tl.program_id(1) * STRIPS + tl.program_id(0), tl.int64) * (2 * HALF)
    columns = tl.arange(0, BLOCK)
    tl.store(partial + columns, tl.sum(total1, 0), mask=columns < HALF)
    tl.store(partial + HALF + columns, tl.sum(total2, 0), mask=columns < HALF)


@jit
def normed_rotary_backward_kernel(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, q_dx_ptr, k_dx_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    statistics_ptr, partial_ptr,
    q_grad_batch, q_grad_head, q_grad_position, k_grad_batch, k_grad_head, k_grad_position,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    q_dx_batch, q_dx_head, q_dx_position, k_dx_batch, k_dx_head, k_dx_position,
    table_batch, length, q_heads, k_heads, q_programs, rows, STRIPS, offset,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    if program < q_programs:
        _back(q_grad_ptr, q_ptr, q_dx_ptr, cos_ptr, sin_ptr, q_weight_ptr, statistics_ptr, partial_ptr, program,
              q_grad_batch, q_grad_head, q_grad_position, q_batch, q_head, q_position, q_dx_batch, q_dx_head,
              q_dx_position, table_batch, length, q_heads, q_heads + k_heads, rows, STRIPS, offset,
              HALF, HEADS, BLOCK)  # fmt: skip
    else:
        _back(k_grad_ptr, k_ptr, k_dx_ptr, cos_ptr, sin_ptr, k_weight_ptr, statistics_ptr + q_heads, partial_ptr,
              program - q_programs, k_grad_batch, k_grad_head, k_grad_position, k_batch, k_head, k_position,
              k_dx_batch, k_dx_head, k_dx_position, table_batch, length, k_heads, q_heads + k_heads, rows, STRIPS,
              offset, HALF, HEADS, BLOCK)  # fmt: skip


def _is_supported(*tensors: Tensor) -> bool:
    x = tensors[0]
    rows_are_dense = all(each.stride(-1) == 1 and each.numel() for each in tensors)
    return rows_are_dense and x.dtype != torch.float64 and x.shape[-1] % 2 == 0 and x.shape[-1] <= 2048


def _blocks(query: Tensor, key: Tensor, elements: int) -> tuple[dict[str, int], int, int]:
    """How many heads a program takes, and how many programs queries and keys have each."""
    half, (q_heads, k_heads) = query.shape[-1] // 2, (query.shape[1], key.shape[1])
    block = power_of_two(half, 1 << 20)
    together = power_of_two(max(q_heads, k_heads), max(1, elements // block))
    return {"HALF": half, "HEADS": together, "BLOCK": block}, -(-q_heads // together), -(-k_heads // together)


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


@normed_rotary.register_kernel("cuda")
def normed_rotary_triton(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    if not _is_supported(query, key):
        return reference(query, key, cos, sin, query_weight, key_weight, eps, offset, keeps_dtype)
    batch, q_heads, length, _ = query.shape
    dtype, k_heads = result_dtype(query.dtype, query_weight.dtype, keeps_dtype), key.shape[1]
    out = (torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype))
    statistics = query.new_empty((batch, length, q_heads + k_heads), dtype=torch.float32)
    cos, sin = cos.contiguous(), sin.contiguous()
    flags, q_programs, k_programs = _blocks(query, key, 2048)
    tensors = (query, key, cos, sin, query_weight.contiguous(), key_weight.contiguous(), *out, statistics)
    sizes = (cos.stride(0) if len(cos) > 1 else 0, length, q_heads, k_heads, q_programs, eps, offset)
    grid = (batch * length, q_programs + k_programs)
    launch(normed_rotary_kernel, grid, *tensors, *_strides(query, key, *out), *sizes, **flags)
    return *out, statistics


@normed_rotary_backward.register_kernel("cuda")
def normed_rotary_backward_triton(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    statistics: Tensor,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not _is_supported(query, key, of_query, of_key):
        given = (of_query, of_key, query, key, cos, sin, query_weight, key_weight, statistics)
        made: tuple[Tensor, Tensor, Tensor, Tensor] = normed_rotary_backward.plain(*given, offset)
        return made
    batch, q_heads, length, width = query.shape
    cos, sin, dx = cos.contiguous(), sin.contiguous(), (torch.empty_like(query), torch.empty_like(key))
    flags, q_programs, k_programs = _blocks(query, key, 1024)
    rows = batch * length
    count = strips(rows)
    partial = query.new_empty((q_programs + k_programs, count, width), dtype=torch.float32)
    weights = (query_weight.contiguous(), key_weight.contiguous())
    tensors = (of_query, of_key, query, key, *dx, cos, sin, *weights, statistics, partial)
    strides = _strides(of_query, of_key, query, key, *dx)
    table_batch = cos.stride(0) if len(cos) > 1 else 0
    sizes = (table_batch, length, q_heads, key.shape[1], q_programs, rows, count, offset)
    launch(normed_rotary_backward_kernel, (count, q_programs + k_programs), *tensors, *strides, *sizes, **flags)
    grads = [part.sum((0, 1)) for part in partial.split((q_programs, k_programs))]
    return *dx, grads[0].to(query_weight.dtype), grads[1].to(key_weight.dtype)
