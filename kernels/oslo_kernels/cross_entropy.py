"""The two passes over the logits of a chunked linear cross entropy: the statistics of each row, then its gradient.

Between them the caller combines the statistics of rows that are sharded over several processes. Kernels accumulate in
float32. Shapes: N rows, R rows of a part, v tokens of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, tl, wide

PART = 1 << 20
"""Logits that a CPU computes with at a time: few enough for its last-level cache, enough to keep all threads busy."""


@torch.library.custom_op("oslo::row_statistics", mutates_args=())
def row_statistics(logits_Nv: Tensor) -> Tensor:
    """``[3, N]``: for each row the maximum, the sum of ``exp(logit - maximum)``, and the sum of the logits."""
    parts = []
    for part_Rv in logits_Nv.split(_rows(logits_Nv)):
        part_Rv = part_Rv.to(wide(logits_Nv.dtype))
        highest_R1 = part_Rv.amax(-1, keepdim=True)
        parts.append(torch.stack((highest_R1.squeeze(-1), (part_Rv - highest_R1).exp_().sum(-1), part_Rv.sum(-1))))
    return torch.cat(parts, -1)


@torch.library.custom_op("oslo::softmax_minus", mutates_args=("logits_Nv",))
def softmax_minus_(logits_Nv: Tensor, log_total_N: Tensor, uniform: float) -> None:
    """Replace logits by ``exp(logit - log_total) - uniform``, in place."""
    rows = _rows(logits_Nv)
    for part_Rv, log_total_R in zip(logits_Nv.split(rows), log_total_N.split(rows), strict=True):
        grad_Rv = part_Rv.to(log_total_N.dtype).sub_(log_total_R.unsqueeze(-1)).exp_()
        if uniform:
            grad_Rv.sub_(uniform)
        if grad_Rv.dtype != logits_Nv.dtype:  # otherwise the operations above worked in place
            part_Rv.copy_(grad_Rv)


def _rows(logits_Nv: Tensor) -> int:
    return max(1, PART // max(1, logits_Nv.shape[1]))


@row_statistics.register_fake
def _(logits_Nv: Tensor) -> Tensor:
    return logits_Nv.new_empty((3, logits_Nv.shape[0]), dtype=wide(logits_Nv.dtype))


@jit
def statistics_kernel(logits_ptr, out_ptr, row_stride, rows, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        x = tl.load(logits_ptr + row * row_stride + start + offsets, mask=inside, other=0.0).to(tl.float32)
        summed += x
        x = tl.where(inside, x, float("-inf"))
        higher = tl.maximum(highest, x)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - finite) + tl.exp(x - finite)
        highest = higher
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + rows + row, tl.sum(total * tl.exp(highest - base), 0))
    tl.store(out_ptr + 2 * rows + row, tl.sum(summed, 0))


@jit
def softmax_minus_kernel(logits_ptr, log_total_ptr, row_stride, columns, uniform, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log_total = tl.load(log_total_ptr + row)
    pointers = logits_ptr + row * row_stride + offsets
    x = tl.load(pointers, mask=offsets < columns).to(tl.float32)
    tl.store(pointers, tl.exp(x - log_total) - uniform, mask=offsets < columns)


@row_statistics.register_kernel("cuda")
def row_statistics_triton(logits_Nv: Tensor) -> Tensor:
    if wide(logits_Nv.dtype) != torch.float32 or logits_Nv.stride(-1) != 1:
        return _plain(row_statistics)(logits_Nv)
    rows, columns = logits_Nv.shape
    out_3N = logits_Nv.new_empty((3, rows), dtype=torch.float32)
    block = power_of_two(columns, 4096)
    launch(statistics_kernel, (rows,), logits_Nv, out_3N, logits_Nv.stride(0), rows, columns, num_warps=8, BLOCK=block)
    return out_3N


@softmax_minus_.register_kernel("cuda")
def softmax_minus_triton(logits_Nv: Tensor, log_total_N: Tensor, uniform: float) -> None:
    if wide(logits_Nv.dtype) != torch.float32 or logits_Nv.stride(-1) != 1:
        _plain(softmax_minus_)(logits_Nv, log_total_N, uniform)
        return
    rows, columns = logits_Nv.shape
    block = power_of_two(columns, 4096)
    grid = (rows, -(-columns // block))
    launch(
        softmax_minus_kernel, grid, logits_Nv, log_total_N, logits_Nv.stride(0), columns, float(uniform), BLOCK=block
    )


def _plain(operation: Any) -> Any:
    return operation._init_fn
