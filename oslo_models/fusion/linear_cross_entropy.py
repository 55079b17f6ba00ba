"""Head and cross entropy in one, a few rows at a time, over any part of the vocabulary: the logits never all exist.

Source of making the gradients chunk by chunk in the forward pass: Hsu et al., "Liger Kernel", 2024, section 3.2.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_kernels.cross_entropy import row_statistics, softmax_minus_
from oslo_kernels.language import wide
from oslo_models.distributed.collectives import reduce_fresh
from oslo_models.layers.cross_entropy import VocabShard

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 512 << 20}
"""How much the logits of a chunk take at most, by the type of device."""
CHUNKS, FAST_ROWS = 16, 256
"""Into how many chunks a batch is cut while they keep as many rows as products need to be fast."""


def linear_cross_entropy(
    hidden_NH: Tensor, weight_vH: Tensor, bias_v: Tensor | None, target_N: Tensor, words: VocabShard
) -> Tensor:
    """The cross entropy of ``hidden @ weight.T + bias``, summed over the rows that count, as a scalar.

    Gradients are made in the forward pass, so it can be differentiated once. Half precision sums in float32. Two
    all-reduces of O(rows) numbers travel per chunk, and one of ``hidden``'s gradient in the backward pass.

    Args:
        hidden_NH: the same on every rank, as is its gradient: the sum over the axis is part of this operation, which
            knows that nobody else has the gradient and adds up in place.
        weight_vH: the rows of this rank's words.
        target_N: indices into the whole vocabulary, the same on every rank.

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index``. On CUDA it is a device-side assertion,
            as with torch's cross entropy, which the next call that waits for the device reports.
    """
    return _LinearCrossEntropy.apply(hidden_NH, weight_vH, bias_v, target_N, words)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_vH: Tensor, bias_v: Tensor | None, target_N: Tensor, words: VocabShard
    ) -> Tensor:
        rows = None
        known = ((target_N == words.ignore_index) | ((target_N >= 0) & (target_N < words.size))).all()
        wrong = f"a target is neither in [0, {words.size}) nor ignore_index={words.ignore_index}"
        if target_N.is_cuda:
            torch._assert_async(known, wrong)  # without waiting for the device
        else:
            if not known:
                raise IndexError(wrong)
            rows = (target_N != words.ignore_index).nonzero().squeeze(-1)  # the others cost nothing
            target_N = target_N[rows]
        with torch.autocast(hidden_NH.device.type, enabled=False):
            loss, ctx.grads = _run(hidden_NH, weight_vH, bias_v, target_N, rows, words, ctx.needs_input_grad)
        ctx.axis = words.axis
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the loss of a fused model can be differentiated once, since its gradients were made in the forward "
                "pass and are given away: call the model again, or undo model.fuse() by model.unfuse()"
            )
        grads, ctx.grads = ctx.grads, None
        for made in grads:
            if made is not None and (grad.is_cuda or grad != 1):  # on the CPU a look is cheaper than a pass
                made.mul_(grad)
        if grads[0] is not None:
            grads[0] = reduce_fresh(ctx.axis, grads[0])
        return (*grads, None, None)


def _run(
    hidden_NH: Tensor,
    weight_vH: Tensor,
    bias_v: Tensor | None,
    target_N: Tensor,
    rows: Tensor | None,
    words: VocabShard,
    needs: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The summed loss, and this rank's gradients of hidden states, weight and bias for a gradient of one."""
    kind = weight_vH.dtype
    sums = wide(kind)
    size = _rows_at_once(len(target_N), weight_vH, words)
    grad_NH = torch.zeros_like(hidden_NH) if needs[0] else None
    grad_vH = torch.zeros_like(weight_vH, dtype=sums) if needs[1] else None
    grad_v = torch.zeros_like(bias_v, dtype=sums) if bias_v is not None and needs[2] else None
    total = torch.zeros((), dtype=sums, device=hidden_NH.device)
    buffer = weight_vH.new_empty(min(size, len(target_N)), len(weight_vH))
    for start in range(0, len(target_N), size):
        target_C = target_N[start : start + size]
        part = slice(start, start + size) if rows is None else rows[start : start + size]
        hidden_CH = hidden_NH[part]
        logits_Cv = buffer[: len(target_C)]
        if bias_v is None:
            torch.mm(hidden_CH, weight_vH.T, out=logits_Cv)
        else:
            torch.addmm(bias_v, hidden_CH, weight_vH.T, out=logits_Cv)
        total += _loss_and_gradient(logits_Cv, target_C, words, any(needs))
        if grad_NH is not None:
            grad_NH[part] = logits_Cv @ weight_vH
        if grad_vH is not None:
            if sums == kind:
                grad_vH.addmm_(logits_Cv.T, hidden_CH)
            else:
                grad_vH += logits_Cv.T @ hidden_CH
        if grad_v is not None:
            grad_v += logits_Cv.sum(0, dtype=sums)
    made = (grad_NH, grad_vH, grad_v)
    return total, [grad if grad is None else grad.to(kind) for grad in made]


def _rows_at_once(rows: int, weight_vH: Tensor, words: VocabShard) -> int:
    """How many rows a chunk has: the same on every rank, however unevenly the words are divided."""
    most_bytes = CHUNK_BYTES.get(weight_vH.device.type, CHUNK_BYTES["cuda"])
    most = most_bytes // (-(-words.size // words.axis.size) * weight_vH.itemsize)
    fast = max(FAST_ROWS, rows // CHUNKS)
    if weight_vH.is_cpu:  # each chunk passes over the gradient of the weight; beside that of a part, logits weigh more
        fast = 2 * fast if words.axis.size == 1 else (fast + 1) // 2
    return max(1, min(most, fast))


def _loss_and_gradient(logits_Cv: Tensor, target_C: Tensor, words: VocabShard, differentiate: bool) -> Tensor:
    """The summed loss of some rows; their gradient takes the place of the logits."""
    start, stop = words.local
    ignored_C = target_C == words.ignore_index
    elsewhere_C = ignored_C | (target_C < start) | (target_C >= stop)
    index_C1 = (target_C - start).masked_fill(elsewhere_C, 0).unsqueeze(-1)
    own_max_C, total_C, sum_C = row_statistics(logits_Cv)
    max_C = reduce_fresh(words.axis, own_max_C.clone(), op=dist.ReduceOp.MAX)
    picked_C = logits_Cv.gather(-1, index_C1).squeeze(-1).to(max_C.dtype).masked_fill(elsewhere_C, 0.0)
    sums_3C = torch.stack((total_C * (own_max_C - max_C).exp(), picked_C, sum_C))
    total_C, picked_C, sum_C = reduce_fresh(words.axis, sums_3C)
    log_total_C = total_C.log() + max_C
    hit, rest = 1.0 - words.smoothing, words.smoothing / words.size
    loss_C = log_total_C - hit * picked_C
    if rest:
        loss_C -= rest * sum_C
    if differentiate:
        softmax_minus_(logits_Cv, log_total_C, rest)
        hits_C1 = torch.full_like(loss_C, -hit).masked_fill(elsewhere_C, 0.0).unsqueeze(-1)
        logits_Cv.scatter_add_(-1, index_C1, hits_C1.to(logits_Cv.dtype))
        if logits_Cv.is_cuda:
            logits_Cv.masked_fill_(ignored_C.unsqueeze(-1), 0.0)
    return loss_C.masked_fill(ignored_C, 0.0).sum()
