"""Cross entropy of logits whose vocabulary is sharded over the tp axis, without gathering them.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. Shapes: N targets, v entries of the vocabulary on this rank.
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
    """This rank's shard of the vocabulary, and the options of a cross entropy over it.

    Attributes:
        axis: the ranks over which the vocabulary is sharded.
        local: the range of token ids on this rank.
        size: the size of the full vocabulary.
        ignore_index: the target that does not count.
        smoothing: the label smoothing, in ``[0, 1]``.
    """

    axis: Axis
    local: Range
    size: int
    ignore_index: int = -100
    smoothing: float = 0.0


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, target_N: Tensor, shard: VocabShard) -> Tensor:
        start, stop = shard.local
        target_weight, other_weight = 1.0 - shard.smoothing, shard.smoothing / shard.size
        is_half = logits_Nv.dtype in (torch.float16, torch.bfloat16)
        buffer_Nv = logits_Nv.float() if is_half else logits_Nv.clone()
        buffer_Nv -= reduce_fresh(shard.axis, buffer_Nv.amax(-1), op=MAX).unsqueeze(-1)
        ignored_N = target_N == shard.ignore_index
        elsewhere_N = (
            ignored_N | ((target_N >= 0) & (target_N < start)) | ((target_N >= stop) & (target_N < shard.size))
        )
        # A target outside the vocabulary keeps its invalid index, so that torch raises as it does without sharding.
        index_N = (target_N - start).masked_fill(elsewhere_N, 0)
        target_logit_N = -F.nll_loss(buffer_Nv, index_N, reduction="none", ignore_index=torch.iinfo(torch.long).min)
        target_logit_N = target_logit_N.masked_fill_(elsewhere_N, 0.0)
        row_sum_N = buffer_Nv.sum(-1) if other_weight else torch.zeros_like(target_logit_N)
        buffer_Nv.exp_()
        total_N, target_logit_N, row_sum_N = reduce_fresh(
            shard.axis, torch.stack((buffer_Nv.sum(-1), target_logit_N, row_sum_N))
        )
        loss_N = total_N.log() - target_weight * target_logit_N - other_weight * row_sum_N
        buffer_Nv /= total_N.unsqueeze(-1)  # the probabilities, which become the gradient
        if other_weight:
            buffer_Nv -= other_weight
        minus_target_N = torch.full_like(loss_N, -target_weight).masked_fill_(elsewhere_N, 0.0)
        buffer_Nv.scatter_add_(-1, index_N.unsqueeze(-1), minus_target_N.unsqueeze(-1))
        ctx.save_for_backward(buffer_Nv, ignored_N)
        ctx.dtype = logits_Nv.dtype
        return loss_N.masked_fill_(ignored_N, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None]:
        buffer_Nv, ignored_N = ctx.saved_tensors
        return (buffer_Nv * grad_N.masked_fill(ignored_N, 0.0).unsqueeze(-1)).to(ctx.dtype), None, None


def vocab_parallel_cross_entropy(logits_Nv: Tensor, target_N: Tensor, shard: VocabShard) -> Tensor:
    """Cross entropy per token, ``[N]``; zero where the target is ``ignore_index``. Half precision computes in float32.

    Communicates two all-reduces of O(N) numbers, independent of the size of the vocabulary.

    Args:
        logits_Nv: this rank's shard of the logits.
        target_N: indices into the full vocabulary, the same on every rank.
        shard: which shard that is.

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index``.
    """
    return _CrossEntropy.apply(logits_Nv, target_N, shard)
