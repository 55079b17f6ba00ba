"""The two passes over the logits of a chunked linear cross entropy: the statistics of each row, then its gradient.

Between them the caller combines the statistics of rows that are sharded over several ranks. Both passes include the
model's transformations of its logits: a factor and a soft cap by tanh. Kernels accumulate in float32.
Shapes: N rows, R rows of a part, v tokens of the vocabulary on this rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oslo_kernels import logits
from oslo_kernels.language import jit, launch, power_of_two, tl, triton, wide

PADDING = 64
"""On a GPU, rows of logits are padded to a multiple of this number."""
PART = 1 << 20
"""Logits that a CPU processes at a time: few enough for its last-level cache, enough to keep all threads busy."""


GROUP = 4
"""Consecutive logits of a row that share a running maximum: 1.25 exponentials per logit."""


@dataclass(frozen=True)
class Rule:
    """The formula of a row's loss from its logits.

    Attributes:
        start: the token of the first column.
        ignore_index: the target of rows that do not count.
        hit, rest: the loss is the logarithm of the total minus ``hit`` times the target's logit and ``rest`` times the
            sum of all logits; ``rest`` is zero without label smoothing.
        scale, cap: a logit is ``scale`` times the product, or ``cap * tanh(scale * product)`` if ``cap`` is not zero.
        padded: whether the logits are from `padded_logits`.
        factor: the factor of the gradient, such as one divided by the number of rows. Losses do not include it.
    """

    start: int = 0
    ignore_index: int = -100
    hit: float = 1.0
    rest: float = 0.0
    scale: float = 1.0
    cap: float = 0.0
    padded: bool = False
    factor: float = 1.0

    def logits(self, products: Tensor) -> Tensor:
        """Return the logits of these products, at least in float32: a new tensor unless nothing changes."""
        made = products.to(wide(products.dtype))
        if self.scale != 1.0:
            made = made * self.scale
        return self.cap * made.tanh() if self.cap else made

    def local(self, target_N: Tensor, columns: int) -> tuple[Tensor, Tensor]:
        """Return the column of each target, ``[N, 1]``, and whether it is on another rank or ignored."""
        ignored_N = target_N == self.ignore_index
        elsewhere_N = ignored_N | (target_N < self.start) | (target_N >= self.start + columns)
        return (target_N - self.start).masked_fill(elsewhere_N, 0).unsqueeze(-1), elsewhere_N

    def columns(self, target_N: Tensor, columns: int) -> Tensor:
        """Return the column of each target as `oslo_kernels.logits` takes it, ``[N]``."""
        index_N1, elsewhere_N = self.local(target_N, columns)
        index_N = index_N1.squeeze(-1).masked_fill_(elsewhere_N, logits.ELSEWHERE)
        return index_N.masked_fill_(target_N == self.ignore_index, logits.IGNORED)

    def losses(self, statistics_4N: Tensor, target_N: Tensor) -> Tensor:
        """Compute the loss of each row from the statistics of the full rows."""
        max_N, total_N, picked_N, sum_N = statistics_4N
        loss_N = total_N.log() + max_N - self.hit * picked_N
        loss_N = loss_N - self.rest * sum_N if self.rest else loss_N
        return loss_N.masked_fill(target_N == self.ignore_index, 0.0)


def row_statistics(logits_Nv: Tensor, target_N: Tensor, rule: Rule) -> Tensor:
    """Return maximum, sum of ``exp(logit - maximum)``, target's logit, and sum of logits of each row, ``[4, N]``.

    The target's logit is zero where the target is ignored or on another rank.
    """
    if _is_in_cpp(logits_Nv, rule):
        return logits.statistics(logits_Nv, rule.columns(target_N, logits_Nv.shape[1]))
    return (row_statistics_triton if _has_kernel(logits_Nv) else row_statistics_plain)(logits_Nv, target_N, rule)


def replace_by_gradient_(logits_Nv: Tensor, statistics_4N: Tensor, target_N: Tensor, rule: Rule) -> Tensor:
    """Replace products by ``rule.factor`` times the gradient of the summed loss, in place. Padding is set to zero.

    Args:
        statistics_4N: the statistics of the full rows.

    Returns:
        The loss of each row, ``[N]``.
    """
    if _is_in_cpp(logits_Nv, rule):
        log_total_N = statistics_4N[1].log() + statistics_4N[0] - math.log(rule.factor)
        columns_N = rule.columns(target_N, logits_Nv.shape[1])
        logits.replace_by_gradient_(logits_Nv, columns_N, log_total_N, rule.hit * rule.factor, rule.rest * rule.factor)
        return rule.losses(statistics_4N, target_N)
    run = replace_by_gradient_triton if _has_kernel(logits_Nv) else replace_by_gradient_plain
    return run(logits_Nv, statistics_4N, target_N, rule)


def _is_in_cpp(logits_Nv: Tensor, rule: Rule) -> bool:
    return rule.scale == 1.0 and not rule.cap and logits.computes(logits_Nv)


def _has_kernel(logits_Nv: Tensor) -> bool:
    supported = wide(logits_Nv.dtype) == torch.float32 and logits_Nv.stride(-1) == 1 and logits_Nv.numel() > 0
    return logits_Nv.is_cuda and triton is not None and supported


def row_statistics_plain(logits_Nv: Tensor, target_N: Tensor, rule: Rule) -> Tensor:
    """`row_statistics` in plain torch."""
    parts = []
    index_N1, elsewhere_N = rule.local(target_N, logits_Nv.shape[1])
    rows = _rows(logits_Nv)
    for part_Rv, index_R1 in zip(logits_Nv.split(rows), index_N1.split(rows), strict=True):
        part_Rv = rule.logits(part_Rv)
        highest_R1 = part_Rv.amax(-1, keepdim=True)
        total_R = (part_Rv - highest_R1).exp_().sum(-1)
        parts.append(
            torch.stack((highest_R1.squeeze(-1), total_R, part_Rv.gather(-1, index_R1).squeeze(-1), part_Rv.sum(-1)))
        )
    statistics_4N = torch.cat(parts, -1)
    statistics_4N[2].masked_fill_(elsewhere_N, 0.0)
    return statistics_4N


def replace_by_gradient_plain(logits_Nv: Tensor, statistics_4N: Tensor, target_N: Tensor, rule: Rule) -> Tensor:
    """`replace_by_gradient_` in plain torch."""
    rows = _rows(logits_Nv)
    log_total_N1 = (statistics_4N[1].log() + statistics_4N[0] - math.log(rule.factor)).unsqueeze(-1)
    index_N1, elsewhere_N = rule.local(target_N, logits_Nv.shape[1])
    hits_N1 = torch.full_like(log_total_N1, -rule.hit * rule.factor).masked_fill_(elsewhere_N.unsqueeze(-1), 0.0)
    ignored_N1 = (target_N == rule.ignore_index).unsqueeze(-1)
    some_are_ignored = bool(ignored_N1.any())
    per_row = (x.split(rows) for x in (logits_Nv, log_total_N1, index_N1, hits_N1, ignored_N1))
    for part_Rv, log_total_R1, index_R1, hits_R1, ignored_R1 in zip(*per_row, strict=True):
        made_Rv = rule.logits(part_Rv)
        slope_Rv = rule.scale * (rule.cap - made_Rv.square() / rule.cap) if rule.cap else None
        grad_Rv = made_Rv.sub_(log_total_R1).exp_()  # in place in the logits themselves where they are `part_Rv`
        if rule.rest:
            grad_Rv.sub_(rule.rest * rule.factor)
        grad_Rv.scatter_add_(-1, index_R1, hits_R1)
        if some_are_ignored:
            grad_Rv.masked_fill_(ignored_R1, 0.0)
        if slope_Rv is not None:
            grad_Rv.mul_(slope_Rv)
        elif rule.scale != 1.0:
            grad_Rv.mul_(rule.scale)
        if grad_Rv.data_ptr() != part_Rv.data_ptr():
            part_Rv.copy_(grad_Rv)
    return rule.losses(statistics_4N, target_N)


def _rows(logits_Nv: Tensor) -> int:
    return max(1, PART // max(1, logits_Nv.shape[1]))


def padded_weight(weight_vH: Tensor) -> Tensor:
    """Return the weight ``[w, H]`` for products on a GPU, with rows of zeros if ``v`` is not a multiple of 8.

    cuBLAS takes four times as long where a dimension is odd, as GPT-2's vocabulary is.
    """
    tokens = len(weight_vH)
    if not weight_vH.is_cuda or tokens % 8 == 0:
        return weight_vH
    return torch.nn.functional.pad(weight_vH, (0, 0, 0, -tokens % PADDING))


def padded_logits(weight_vH: Tensor, rows: int) -> Tensor:
    """Allocate uninitialised logits ``[rows, w]``. On a GPU, ``w`` is ``v`` rounded up to a multiple of 64.

    Kernels then use vector accesses for any vocabulary size.
    """
    tokens = len(weight_vH)
    return weight_vH.new_empty(rows, tokens + (-tokens % PADDING if weight_vH.is_cuda else 0))


def _width(logits_Nv: Tensor, padded: bool) -> int:
    """Return the number of columns of a row that may be read and overwritten."""
    columns = logits_Nv.shape[1]
    return -(-columns // PADDING) * PADDING if padded and logits_Nv.stride(0) % PADDING == 0 else columns


@jit
def _logit(x, scale, cap, CAPPED: tl.constexpr):
    y = x * scale
    if CAPPED:
        y = cap * (1.0 - 2.0 / (tl.exp(2.0 * y) + 1.0))  # tanh
    return y


@jit
def statistics_kernel(
    logits_ptr, target_ptr, out_ptr, row_stride, rows, columns, width, first, ignored, scale, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    # A group is in the registers of one thread. Its elements share a maximum, so one exponential rescales their total.
    highest = tl.full((BLOCK // GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK // GROUP,), tl.float32)
    summed = tl.zeros((BLOCK // GROUP,), tl.float32)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        readable = start + offsets < width  # unlike the number of columns a multiple of a vector's length
        x = tl.load(logits_ptr + row * row_stride + start + offsets, mask=readable, other=0.0).to(tl.float32)
        x = _logit(x, scale, cap, CAPPED)
        summed += tl.sum(tl.reshape(tl.where(inside, x, 0.0), (BLOCK // GROUP, GROUP)), 1)
        grouped = tl.reshape(tl.where(inside, x, float("-inf")), (BLOCK // GROUP, GROUP))
        higher = tl.maximum(highest, tl.max(grouped, 1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - finite) + tl.sum(tl.exp(grouped - finite[:, None]), 1)
        highest = higher
    top = tl.max(highest, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    target = tl.load(target_ptr + row)
    column = target - first
    here = (target != ignored) & (column >= 0) & (column < columns)
    picked = tl.load(logits_ptr + row * row_stride + column, mask=here, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, top)
    tl.store(out_ptr + rows + row, tl.sum(total * tl.exp(highest - base), 0))
    tl.store(out_ptr + 2 * rows + row, tl.where(here, _logit(picked, scale, cap, CAPPED), 0.0))
    tl.store(out_ptr + 3 * rows + row, tl.sum(summed, 0))


@jit
def gradient_kernel(
    logits_ptr, statistics_ptr, target_ptr, loss_ptr, row_stride, rows, columns, width, first, ignored, hit, rest,
    scale, cap, factor, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(target_ptr + row)
    counts = target != ignored
    log_total = tl.load(statistics_ptr + row) + tl.log(tl.load(statistics_ptr + rows + row))
    if tl.program_id(1) == 0:
        picked = tl.load(statistics_ptr + 2 * rows + row)
        loss = log_total - hit * picked - rest * tl.load(statistics_ptr + 3 * rows + row)
        tl.store(loss_ptr + row, tl.where(counts, loss, 0.0))
    pointers = logits_ptr + row * row_stride + offsets
    y = _logit(tl.load(pointers, mask=offsets < width).to(tl.float32), scale, cap, CAPPED)
    grad = tl.exp(y - log_total) - rest - tl.where(offsets == target - first, hit, 0.0)
    if CAPPED:
        grad *= scale * (cap - y * y / cap)
    else:
        grad *= scale
    # products read the padding too
    tl.store(pointers, tl.where(counts & (offsets < columns), grad * factor, 0.0), mask=offsets < width)


def row_statistics_triton(logits_Nv: Tensor, target_N: Tensor, rule: Rule) -> Tensor:
    """`row_statistics` by a kernel."""
    rows, columns = logits_Nv.shape
    out_4N = logits_Nv.new_empty((4, rows), dtype=torch.float32)
    sizes = (logits_Nv.stride(0), rows, columns, _width(logits_Nv, rule.padded))
    numbers = (rule.start, rule.ignore_index, float(rule.scale), float(rule.cap))
    block = power_of_two(columns, 4096)
    flags = {"CAPPED": bool(rule.cap), "BLOCK": block, "GROUP": min(GROUP, block)}
    given = (logits_Nv, target_N.contiguous(), out_4N)
    launch(statistics_kernel, (rows,), *given, *sizes, *numbers, num_warps=8, **flags)
    return out_4N


def replace_by_gradient_triton(logits_Nv: Tensor, statistics_4N: Tensor, target_N: Tensor, rule: Rule) -> Tensor:
    """`replace_by_gradient_` by a kernel."""
    rows, columns = logits_Nv.shape
    width = _width(logits_Nv, rule.padded)
    loss_N = statistics_4N.new_empty(rows)
    block = power_of_two(width, 4096)
    sizes = (logits_Nv.stride(0), rows, columns, width, rule.start, rule.ignore_index)
    numbers = (float(rule.hit), float(rule.rest), float(rule.scale), float(rule.cap), float(rule.factor))
    flags = {"CAPPED": bool(rule.cap), "BLOCK": block}
    given = (logits_Nv, statistics_4N.contiguous(), target_N.contiguous(), loss_N)
    launch(gradient_kernel, (rows, -(-width // block)), *given, *sizes, *numbers, **flags)
    return loss_N
