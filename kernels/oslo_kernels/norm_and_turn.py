"""The kernels of `normed_rotary`, for norms of each head, and of `full_norm_rotary`, for norms over all heads."""

from __future__ import annotations

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, strips, tl
from oslo_kernels.norm import result_dtype


@jit
def _norm_and_turn(
    x_ptr, y_ptr, cos_ptr, sin_ptr, weight_ptr, statistics_ptr, table, x_head, y_head, heads, first, count, eps, offset,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    head = first * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (d < HALF)
    x = x_ptr + head[:, None].to(tl.int64) * x_head + d
    x1 = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    x2 = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32)
    weight = weight_ptr + d
    if FULL:
        weight += head[:, None] * (2 * HALF)
        scale = tl.zeros((HEADS,), tl.float32) + tl.rsqrt(tl.load(statistics_ptr) / count + eps)
    else:
        scale = tl.rsqrt(tl.sum(x1 * x1 + x2 * x2, 1) / (2 * HALF) + eps)
        tl.store(statistics_ptr + head, scale, mask=head < heads)
    w1 = tl.load(weight, mask=inside if FULL else d < HALF).to(tl.float32) + offset
    w2 = tl.load(weight + HALF, mask=inside if FULL else d < HALF).to(tl.float32) + offset
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
    table_batch, length, q_heads, k_heads, q_programs, eps, offset, q_count, k_count,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // length, row % length
    program = tl.program_id(1)
    table = table_batch * batch + position * (2 * HALF)
    k_first = 1 if FULL else q_heads  # where the statistics of keys begin
    statistics = statistics_ptr + row * (2 if FULL else q_heads + k_heads)
    if program < q_programs:
        q = q_ptr + batch * q_batch + position * q_position
        out = q_out_ptr + batch * q_out_batch + position * q_out_position
        _norm_and_turn(q, out, cos_ptr, sin_ptr, q_weight_ptr, statistics, table, q_head, q_out_head, q_heads,
                       program, q_count, eps, offset, HALF, HEADS, BLOCK, FULL)  # fmt: skip
    else:
        k = k_ptr + batch * k_batch + position * k_position
        out = k_out_ptr + batch * k_out_batch + position * k_out_position
        _norm_and_turn(k, out, cos_ptr, sin_ptr, k_weight_ptr, statistics + k_first, table, k_head, k_out_head,
                       k_heads, program - q_programs, k_count, eps, offset, HALF, HEADS, BLOCK, FULL)  # fmt: skip


@jit
def _back(
    grad_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, weight_ptr, statistics_ptr, products_ptr, partial_ptr, first,
    grad_batch, grad_head, grad_position, x_batch, x_head, x_position, dx_batch, dx_head, dx_position,
    table_batch, length, heads, all_heads, rows, STRIPS, offset, count, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    head = first * HEADS + tl.arange(0, HEADS)
    wide_head = head[:, None].to(tl.int64)
    d = tl.arange(0, BLOCK)[None, :]
    inside = (head < heads)[:, None] & (d < HALF)
    weight = weight_ptr + d
    if FULL:
        weight += head[:, None] * (2 * HALF)
    w1 = tl.load(weight, mask=inside if FULL else d < HALF).to(tl.float32) + offset
    w2 = tl.load(weight + HALF, mask=inside if FULL else d < HALF).to(tl.float32) + offset
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
        if FULL:
            square = tl.load(statistics_ptr + tl.cast(row, tl.int64) * 2)
            scale = tl.zeros((HEADS,), tl.float32) + tl.rsqrt(square / count + eps)
        else:
            scale = tl.load(statistics_ptr + tl.cast(row, tl.int64) * all_heads + head, mask=head < heads, other=0.0)
        x = x_ptr + batch * x_batch + position * x_position + wide_head * x_head + d
        n1 = tl.load(x, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        n2 = tl.load(x + HALF, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        total1 += tl.where(inside, dy1 * n1, 0.0)
        total2 += tl.where(inside, dy2 * n2, 0.0)
        wdy1 = tl.where(inside, dy1 * w1, 0.0)
        wdy2 = tl.where(inside, dy2 * w2, 0.0)
        if FULL:
            mean = tl.load(products_ptr + tl.cast(row, tl.int64) * 2) / count
        else:
            mean = (tl.sum(wdy1 * n1 + wdy2 * n2, 1) / (2 * HALF))[:, None]
        dx = dx_ptr + batch * dx_batch + position * dx_position + wide_head * dx_head + d
        tl.store(dx, (wdy1 - n1 * mean) * scale[:, None], mask=inside)
        tl.store(dx + HALF, (wdy2 - n2 * mean) * scale[:, None], mask=inside)
    if FULL:
        partial = partial_ptr + tl.cast(tl.program_id(0) * all_heads, tl.int64) * (2 * HALF)
        partial += head[:, None] * (2 * HALF) + d
        tl.store(partial, total1, mask=inside)
        tl.store(partial + HALF, total2, mask=inside)
    else:
        partial = partial_ptr + tl.cast(tl.program_id(1) * STRIPS + tl.program_id(0), tl.int64) * (2 * HALF)
        columns = tl.arange(0, BLOCK)
        tl.store(partial + columns, tl.sum(total1, 0), mask=columns < HALF)
        tl.store(partial + HALF + columns, tl.sum(total2, 0), mask=columns < HALF)


@jit
def normed_rotary_backward_kernel(
    q_grad_ptr, k_grad_ptr, q_ptr, k_ptr, q_dx_ptr, k_dx_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    statistics_ptr, products_ptr, partial_ptr,
    q_grad_batch, q_grad_head, q_grad_position, k_grad_batch, k_grad_head, k_grad_position,
    q_batch, q_head, q_position, k_batch, k_head, k_position,
    q_dx_batch, q_dx_head, q_dx_position, k_dx_batch, k_dx_head, k_dx_position,
    table_batch, length, q_heads, k_heads, q_programs, rows, STRIPS, offset, q_count, k_count, eps,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(1)
    k_first = 1 if FULL else q_heads  # where the statistics of keys begin
    k_partial = partial_ptr + (q_heads * (2 * HALF) if FULL else 0)
    if program < q_programs:
        _back(q_grad_ptr, q_ptr, q_dx_ptr, cos_ptr, sin_ptr, q_weight_ptr, statistics_ptr, products_ptr, partial_ptr,
              program, q_grad_batch, q_grad_head, q_grad_position, q_batch, q_head, q_position, q_dx_batch, q_dx_head,
              q_dx_position, table_batch, length, q_heads, q_heads + k_heads, rows, STRIPS, offset, q_count, eps,
              HALF, HEADS, BLOCK, FULL)  # fmt: skip
    else:
        _back(k_grad_ptr, k_ptr, k_dx_ptr, cos_ptr, sin_ptr, k_weight_ptr, statistics_ptr + k_first, products_ptr + 1,
              k_partial, program - q_programs, k_grad_batch, k_grad_head, k_grad_position, k_batch, k_head, k_position,
              k_dx_batch, k_dx_head, k_dx_position, table_batch, length, k_heads, q_heads + k_heads, rows, STRIPS,
              offset, k_count, eps, HALF, HEADS, BLOCK, FULL)  # fmt: skip


def is_supported(*tensors: Tensor) -> bool:
    """Return whether the kernels can read these queries and keys."""
    x = tensors[0]
    rows_are_dense = all(each.stride(-1) == 1 and each.numel() for each in tensors)
    return rows_are_dense and x.dtype != torch.float64 and x.shape[-1] % 2 == 0 and x.shape[-1] <= 2048


def _blocks(query: Tensor, key: Tensor, elements: int) -> tuple[dict[str, int], int, int]:
    """Return the launch flags with the heads per program, and the numbers of programs of queries and of keys."""
    half, (q_heads, k_heads) = query.shape[-1] // 2, (query.shape[1], key.shape[1])
    block = power_of_two(half, 1 << 20)
    together = power_of_two(max(q_heads, k_heads), max(1, elements // block))
    return {"HALF": half, "HEADS": together, "BLOCK": block}, -(-q_heads // together), -(-k_heads // together)


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head and position of each tensor."""
    return [stride for x in tensors for stride in x.stride()[:3]]


def run(
    query: Tensor, key: Tensor, tables: tuple[Tensor, Tensor], weights: tuple[Tensor, Tensor], statistics: Tensor,
    numbers: tuple[float, ...], keeps_dtype: bool, full: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Launch the forward kernel.

    Args:
        statistics: the output for the scales of heads; with ``full``, the input sums of squares of queries and keys.
        numbers: ``eps``, ``offset`` and, with ``full``, the numbers of elements in the sums of squares.
    """
    dtype = result_dtype(query.dtype, weights[0].dtype, keeps_dtype)
    out = (torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype))
    cos, sin = (table.contiguous() for table in tables)
    flags, q_programs, k_programs = _blocks(query, key, 2048)
    tensors = (query, key, cos, sin, *(weight.contiguous() for weight in weights), *out, statistics)
    (batch, q_heads, length, _), table_batch = query.shape, cos.stride(0) if len(cos) > 1 else 0
    sizes = (table_batch, length, q_heads, key.shape[1], q_programs, *numbers)
    grid = (batch * length, q_programs + k_programs)
    launch(normed_rotary_kernel, grid, *tensors, *_strides(query, key, *out), *sizes, FULL=full, **flags)
    return out


def run_backward(
    grads: tuple[Tensor, Tensor], query: Tensor, key: Tensor, tables: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor], statistics: Tensor, products: Tensor, numbers: tuple[float, ...], full: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Launch the backward kernel and return the gradients of queries, keys and both weights.

    Args:
        numbers: ``offset``, the numbers of elements in the sums (with ``full``), and ``eps``.
    """
    batch, q_heads, length, width = query.shape
    dx, (cos, sin) = (torch.empty_like(query), torch.empty_like(key)), (table.contiguous() for table in tables)
    flags, q_programs, k_programs = _blocks(query, key, 1024)
    rows, programs, k_heads = batch * length, q_programs + k_programs, key.shape[1]
    count = strips(rows)
    parts = (count, (q_heads + k_heads) * width) if full else (programs, count, width)
    partial = query.new_empty(parts, dtype=torch.float32)
    own = (weight.contiguous() for weight in weights)
    tensors = (*grads, query, key, *dx, cos, sin, *own, statistics, products, partial)
    table_batch = cos.stride(0) if len(cos) > 1 else 0
    sizes = (table_batch, length, q_heads, k_heads, q_programs, rows, count, *numbers)
    distances = _strides(*grads, query, key, *dx)
    launch(normed_rotary_backward_kernel, (count, programs), *tensors, *distances, *sizes, FULL=full, **flags)
    if full:
        made = partial.sum(0).split((q_heads * width, k_heads * width))
    else:
        made = [part.sum((0, 1)) for part in partial.split((q_programs, k_programs))]
    return *dx, *(grad.to(weight.dtype) for grad, weight in zip(made, weights, strict=True))
