"""Cross entropy of logits whose vocabulary is divided over the tp axis, without gathering them.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. Shapes: N tokens, V words of which this rank holds v.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from oslo_models.collectives import all_reduce
from oslo_models.layout import Range
from oslo_models.mesh import Axis


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        target_N: Tensor,
        axis: Axis,
        local: Range,
        vocab: int,
        ignore: int,
        smoothing: float,
    ) -> Tensor:
        start, stop = local
        half = logits_Nv.dtype in (torch.float16, torch.bfloat16)
        shifted_Nv = logits_Nv.float() if half else logits_Nv.clone()
        shifted_Nv -= all_reduce(axis, shifted_Nv.amax(-1), op=dist.ReduceOp.MAX).unsqueeze(-1)
        ignored_N = target_N == ignore
        elsewhere_N = ignored_N | ((target_N >= 0) & (target_N < start)) | ((target_N >= stop) & (target_N < vocab))
        # A target outside the vocabulary keeps its impossible index, so that torch refuses it as it would undivided.
        index_N = (target_N - start).masked_fill(elsewhere_N, 0)
        picked_N = -F.nll_loss(shifted_Nv, index_N, reduction="none", ignore_index=torch.iinfo(torch.long).min)
        picked_N = picked_N.masked_fill_(elsewhere_N, 0.0)
        row_sum_N = shifted_Nv.sum(-1) if smoothing else torch.zeros_like(picked_N)
        probs_Nv = shifted_Nv.exp_()
        sums_3N = all_reduce(axis, torch.stack((probs_Nv.sum(-1), picked_N, row_sum_N)))
        total_N, picked_N, row_sum_N = sums_3N
        log_total_N = total_N.log()
        loss_N = log_total_N - (1.0 - smoothing) * picked_N - smoothing / vocab * row_sum_N
        probs_Nv /= total_N.unsqueeze(-1)
        ctx.save_for_backward(probs_Nv, index_N, elsewhere_N, ignored_N)
        ctx.smoothing, ctx.vocab, ctx.dtype = smoothing, vocab, logits_Nv.dtype
        return loss_N.masked_fill_(ignored_N, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor | None, ...]:
        probs_Nv, index_N, elsewhere_N, ignored_N = ctx.saved_tensors
        grad_N = grad_N.masked_fill(ignored_N, 0.0)
        grad_Nv = probs_Nv * grad_N.unsqueeze(-1)
        hit_N = (-(1.0 - ctx.smoothing) * grad_N).masked_fill_(elsewhere_N, 0.0)
        grad_Nv.scatter_add_(-1, index_N.unsqueeze(-1), hit_N.unsqueeze(-1))
        if ctx.smoothing:
            grad_Nv -= (ctx.smoothing / ctx.vocab * grad_N).unsqueeze(-1)
        return grad_Nv.to(ctx.dtype), None, None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_Nv: Tensor,
    target_N: Tensor,
    axis: Axis,
    local: Range,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy per token, ``[N]``; zero where the target is ``ignore_index``. Half precision computes in float32.

    Two all-reduces of O(N) numbers travel, whatever the vocabulary.

    Args:
        logits_Nv: this rank's part of the logits.
        target_N: indices into the whole vocabulary, the same on every rank.
        local: the range of words that this rank holds.
        vocab_size: the number of words on all ranks together.

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index``.
    """
    return _CrossEntropy.apply(logits_Nv, target_N, axis, local, vocab_size, ignore_index, label_smoothing)
