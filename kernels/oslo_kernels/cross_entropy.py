"""The two passes over the logits of a chunked linear cross entropy: the statistics of each row, then its gradient.

Between them the caller combines the statistics of rows that are sharded over several processes. Kernels accumulate in
float32. Shapes: N rows, R rows of a part, v tokens of the vocabulary on this rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, tl, wide

PADDING = 64
"""On a GPU, rows of logits are padded to a multiple of this many."""
PART = 1 << 20
"""Logits that a CPU computes with at a time: few enough for its last-level cache, enough to keep all threads busy."""


@torch.library.custom_op("oslo::row_statistics", mutates_args=())
def row_statistics(logits_Nv: Tensor, padded: bool = False) -> Tensor:
    """``[3, N]``: for each row the maximum, the sum of ``exp(logit - maximum)``, and the sum of the logits.

    Args:
        padded: whether the logits are from `padded_logits`.
    """
    parts = []
    for part_Rv in logits_Nv.split(_rows(logits_Nv)):
        part_Rv = part_Rv.to(wide(logits_Nv.dtype))
        highest_R1 = part_Rv.amax(-1, keepdim=True)
        parts.append(torch.stack((highest_R1.squeeze(-1), (part_Rv - highest_R1).exp_().sum(-1), part_Rv.sum(-1))))
    return torch.cat(parts, -1)


@torch.library.custom_op("oslo::softmax_minus", mutates_args=("logits_Nv",))
def softmax_minus_(logits_Nv: Tensor, log_total_N: Tensor, uniform: float, padded: bool = False) -> None:
    """Replace logits by ``exp(logit - log_total) - uniform``, in place. What pads them is overwritten."""
    rows = _rows(logits_Nv)
    for part_Rv, log_total_R in zip(logits_Nv.split(rows), log_total_N.split(rows), strict=True):
        grad_Rv = part_Rv.to(log_total_N.dtype).sub_(log_total_R.unsqueeze(-1)).exp_()
        if uniform:
            grad_Rv.sub_(uniform)
        if grad_Rv.dtype != logits_Nv.dtype:  # otherwise the operations above worked in place
            part_Rv.copy_(grad_Rv)


def _rows(logits_Nv: Tensor) -> int:
    return max(1, PART // max(1, logits_Nv.shape[1]))


def padded_logits(weight_vH: Tensor, rows: int) -> Tensor:
    """Uninitialised logits ``[rows, v]`` of a head, whose rows begin at multiples of 128 bytes on a GPU.

    Kernels access them in vectors, whatever the size of the vocabulary.
    """
    tokens = len(weight_vH)
    width = -(-tokens // PADDING) * PADDING if weight_vH.is_cuda else tokens
    return weight_vH.new_empty(rows, width).narrow(1, 0, tokens)


def _width(logits_Nv: Tensor, padded: bool) -> int:
    """How many columns of a row may be read and overwritten."""
    columns = logits_Nv.shape[1]
    return -(-columns // PADDING) * PADDING if padded and logits_Nv.stride(0) % PADDING == 0 else columns


@row_statistics.register_fake
def _(logits_Nv: Tensor, padded: bool = False) -> Tensor:
    return logits_Nv.new_empty((3, logits_Nv.shape[0]), dtype=wide(logits_Nv.dtype))


@jit
def statistics_kernel(logits_ptr, out_ptr, row_stride, rows, columns, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    summed = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        readable = start + offsets < width  # unlike the number of columns a multiple of a vector's length
        x = tl.load(logits_ptr + row * row_stride + start + offsets, mask=readable, other=0.0).to(tl.float32)
        summed += tl.where(inside, x, 0.0)
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
def softmax_minus_kernel(logits_ptr, log_total_ptr, row_stride, width, uniform, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log_total = tl.load(log_total_ptr + row)
    pointers = logits_ptr + row * row_stride + offsets
    x = tl.load(pointers, mask=offsets < width).to(tl.float32)
    tl.store(pointers, tl.exp(x - log_total) - uniform, mask=offsets < width)


@row_statistics.register_kernel("cuda")
def row_statistics_triton(logits_Nv: Tensor, padded: bool = False) -> Tensor:
    if wide(logits_Nv.dtype) != torch.float32 or logits_Nv.stride(-1) != 1:
        return _plain(row_statistics)(logits_Nv)
    rows, columns = logits_Nv.shape
    out_3N = logits_Nv.new_empty((3, rows), dtype=torch.float32)
    block = power_of_two(columns, 4096)
    sizes = (logits_Nv.stride(0), rows, columns, _width(logits_Nv, padded))
    launch(statistics_kernel, (rows,), logits_Nv, out_3N, *sizes, num_warps=8, BLOCK=block)
    return out_3N


@softmax_minus_.register_kernel("cuda")
def softmax_minus_triton(logits_Nv: Tensor, log_total_N: Tensor, uniform: float, padded: bool = False) -> None:
    if wide(logits_Nv.dtype) != torch.float32 or logits_Nv.stride(-1) != 1:
        _plain(softmax_minus_)(logits_Nv, log_total_N, uniform)
        return
    rows, width = len(logits_Nv), _width(logits_Nv, padded)
    block = power_of_two(width, 4096)
    sizes = (logits_Nv.stride(0), width, float(uniform))
    launch(softmax_minus_kernel, (rows, -(-width // block)), logits_Nv, log_total_N, *sizes, BLOCK=block)


def _plain(operation: Any) -> Any:
    return operation._init_fn
