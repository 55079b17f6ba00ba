"""Cross entropy of logits whose vocabulary is divided over the tp axis, without gathering them.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. Shapes: N tokens, V words of which this rank holds v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.sharding.layout import Range


@dataclass(frozen=True)
class VocabShard:
    """Which words this rank knows, and how targets count.

    Attributes:
        axis: the ranks that hold the vocabulary together.
        local: the range of words that this rank holds, of ``size``.
    """

    axis: Axis
    local: Range
    size: int
    ignore_index: int = -100
    smoothing: float = 0.0


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, target_N: Tensor, words: VocabShard) -> Tensor:
        start, stop = words.local
        hit, rest = 1.0 - words.smoothing, words.smoothing / words.size
        half = logits_Nv.dtype in (torch.float16, torch.bfloat16)
        made_Nv = logits_Nv.float() if half else logits_Nv.clone()
        made_Nv -= reduce_fresh(words.axis, made_Nv.amax(-1), op=MAX).unsqueeze(-1)
        ignored_N = target_N == words.ignore_index
        elsewhere_N = (
            ignored_N | ((target_N >= 0) & (target_N < start)) | ((target_N >= stop) & (target_N < words.size))
        )
        # A target outside the vocabulary keeps its impossible index, so that torch refuses it as it would undivided.
        index_N = (target_N - start).masked_fill(elsewhere_N, 0)
        picked_N = -F.nll_loss(made_Nv, index_N, reduction="none", ignore_index=torch.iinfo(torch.long).min)
        picked_N = picked_N.masked_fill_(elsewhere_N, 0.0)
        row_sum_N = made_Nv.sum(-1) if rest else torch.zeros_like(picked_N)
        made_Nv.exp_()
        total_N, picked_N, row_sum_N = reduce_fresh(words.axis, torch.stack((made_Nv.sum(-1), picked_N, row_sum_N)))
        loss_N = total_N.log() - hit * picked_N - rest * row_sum_N
        made_Nv /= total_N.unsqueeze(-1)  # what was made so far becomes the gradient
        if rest:
            made_Nv -= rest
        hits_N = torch.full_like(loss_N, -hit).masked_fill_(elsewhere_N, 0.0)
        made_Nv.scatter_add_(-1, index_N.unsqueeze(-1), hits_N.unsqueeze(-1))
        ctx.save_for_backward(made_Nv, ignored_N)
        ctx.dtype = logits_Nv.dtype
        return loss_N.masked_fill_(ignored_N, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        made_Nv, ignored_N = ctx.saved_tensors
        return (made_Nv * grad_N.masked_fill(ignored_N, 0.0).unsqueeze(-1)).to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(logits_Nv: Tensor, target_N: Tensor, words: VocabShard) -> Tensor:
    """Cross entropy per token, ``[N]``; zero where the target is ``ignore_index``. Half precision computes in float32.

    Two all-reduces of O(N) numbers travel, whatever the vocabulary.

    Args:
        logits_Nv: this rank's part of the logits.
        target_N: indices into the whole vocabulary, the same on every rank.

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index``.
    """
    return _CrossEntropy.apply(logits_Nv, target_N, words)
