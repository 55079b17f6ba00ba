"""Cross entropy of vocabulary-parallel logits, without gathering them.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3. Shapes: N targets, v local entries of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels import huge_pages, logits
from oslo_kernels.cross_entropy import Rule, replace_by_gradient_, row_statistics
from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.sharding.layout import Range

MANY_LOGITS = 1 << 20
"""Smallest number of CPU logits that the C++ kernels process."""


@dataclass(frozen=True)
class VocabShard:
    """Local shard of the vocabulary, and options of the cross entropy over the full vocabulary.

    Attributes:
        axis: ranks over which the vocabulary is sharded.
        local: range of token ids on this rank.
        size: size of the full vocabulary.
        ignore_index: target value that is ignored.
        smoothing: label smoothing, in ``[0, 1]``.
    """

    axis: Axis
    local: Range
    size: int
    ignore_index: int = -100
    smoothing: float = 0.0

    def rule(self, **options: Any) -> Rule:
        """Return the loss rule for the local logits. ``options`` are further attributes of the rule."""
        return Rule(self.local[0], self.ignore_index, 1.0 - self.smoothing, self.smoothing / self.size, **options)

    def check(self, target_N: Tensor) -> None:
        """Raise ``IndexError`` for a target outside the full vocabulary. On CUDA, assert it asynchronously."""
        known_N = (target_N == self.ignore_index) | ((target_N >= 0) & (target_N < self.size))
        wrong = f"it is neither in [0, {self.size}) nor ignore_index={self.ignore_index}"
        if target_N.is_cuda:
            torch._assert_async(known_N.all(), f"a target is out of bounds: {wrong}")
        elif not known_N.all():
            raise IndexError(f"Target {int(target_N[~known_N][0])} is out of bounds: {wrong}")

    def combined(self, statistics_4N: Tensor) -> Tensor:
        """All-reduce the local row statistics to statistics of full rows (see `row_statistics`)."""
        if self.axis.size == 1:
            return statistics_4N
        own_max_N = statistics_4N[0].clone()
        max_N = reduce_fresh(self.axis, statistics_4N[0].clone(), op=MAX)
        statistics_4N[0] = 0.0
        statistics_4N[1] *= (own_max_N - max_N).exp()
        statistics_4N = reduce_fresh(self.axis, statistics_4N)
        statistics_4N[0] = max_N
        return statistics_4N


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, anchor_Nv: Tensor, target_N: Tensor, shard: VocabShard) -> Tensor:
        ctx.dtype, ctx.shard = logits_Nv.dtype, shard
        shard.check(target_N)
        if logits_Nv.numel() >= MANY_LOGITS and logits.computes(logits_Nv):
            rule = shard.rule()
            statistics_4N = shard.combined(row_statistics(logits_Nv, target_N, rule))
            if not ctx.needs_input_grad[0]:
                return rule.losses(statistics_4N, target_N)
            buffer_Nv = huge_pages.fresh(torch.empty_like(logits_Nv)).copy_(logits_Nv)
            loss_N = replace_by_gradient_(buffer_Nv, statistics_4N, target_N, rule)
            ctx.save_for_backward(buffer_Nv, target_N, anchor_Nv)
            return loss_N
        start, stop = shard.local
        target_weight, other_weight = 1.0 - shard.smoothing, shard.smoothing / shard.size
        is_half = logits_Nv.dtype in (torch.float16, torch.bfloat16)
        buffer_Nv = logits_Nv.float() if is_half else logits_Nv.clone()
        buffer_Nv -= reduce_fresh(shard.axis, buffer_Nv.amax(-1), op=MAX).unsqueeze(-1)
        ignored_N = target_N == shard.ignore_index
        elsewhere_N = (
            ignored_N | ((target_N >= 0) & (target_N < start)) | ((target_N >= stop) & (target_N < shard.size))
        )
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
        ctx.save_for_backward(buffer_Nv, target_N, anchor_Nv)
        return loss_N.masked_fill_(ignored_N, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor) -> tuple[Tensor, None, None, None]:
        buffer_Nv, target_N, anchor_Nv = ctx.saved_tensors
        if torch.is_grad_enabled() and (grad_N.requires_grad or anchor_Nv.requires_grad):
            return _gradient(buffer_Nv, anchor_Nv, target_N, grad_N, ctx.shard), None, None, None
        factor_N1 = grad_N.masked_fill(target_N == ctx.shard.ignore_index, 0.0).unsqueeze(-1)
        out_Nv = huge_pages.fresh(torch.empty_like(buffer_Nv))
        return torch.mul(buffer_Nv, factor_N1, out=out_Nv).to(ctx.dtype), None, None, None


def _gradient(buffer_Nv: Tensor, anchor_Nv: Tensor, target_N: Tensor, grad_N: Tensor, shard: VocabShard) -> Tensor:
    """Compute the gradient of the logits. The result supports gradients of every order."""
    start, stop = shard.local
    here_N1 = ((target_N >= start) & (target_N < stop)).unsqueeze(-1)
    index_N1 = (target_N.unsqueeze(-1) - start).masked_fill(~here_N1, 0)
    constant_Nv = torch.full_like(buffer_Nv, -shard.smoothing / shard.size)
    constant_Nv.scatter_add_(-1, index_N1, here_N1.to(buffer_Nv.dtype) * (shard.smoothing - 1.0))
    probs_Nv = _Probabilities.apply(anchor_Nv, buffer_Nv - constant_Nv, shard.axis)
    factor_N = copy_to(shard.axis, grad_N).masked_fill(target_N == shard.ignore_index, 0.0)
    return ((probs_Nv + constant_Nv) * factor_N.unsqueeze(-1)).to(anchor_Nv.dtype)


class _Anchor(torch.autograd.Function):
    """Zeros without memory in place of the logits. Gradients pass through, so the logits need not be saved."""

    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return logits_Nv.new_zeros(()).expand_as(logits_Nv)

    @staticmethod
    def backward(ctx: Any, grad_Nv: Tensor | None) -> Tensor | None:
        return grad_Nv


class _Probabilities(torch.autograd.Function):
    """Known probabilities of the logits. The backward pass reaches the logits through their `_Anchor`."""

    @staticmethod
    def forward(ctx: Any, anchor_Nv: Tensor, probs_Nv: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.save_for_backward(anchor_Nv, probs_Nv)
        return probs_Nv.clone()

    @staticmethod
    def backward(ctx: Any, grad_Nv: Tensor) -> tuple[Tensor, None, None]:
        anchor_Nv, probs_Nv = ctx.saved_tensors
        probs_Nv = _Probabilities.apply(anchor_Nv, probs_Nv, ctx.axis)
        mean_N1 = copy_to(ctx.axis, reduce_from(ctx.axis, (probs_Nv * grad_Nv).sum(-1, keepdim=True)))
        return (probs_Nv * (grad_Nv - mean_N1)).to(anchor_Nv.dtype), None, None


def vocab_parallel_cross_entropy(logits_Nv: Tensor, target_N: Tensor, shard: VocabShard) -> Tensor:
    """Return the cross entropy per token, ``[N]``. It is zero where the target is ``ignore_index``.

    Half precision computes in float32. Communication is two all-reduces of O(N) numbers, independent of the size of the
    vocabulary.

    Args:
        logits_Nv: local shard of the logits.
        target_N: indices into the full vocabulary, replicated.
        shard: local shard of the vocabulary.

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index``.
    """
    return _CrossEntropy.apply(logits_Nv, _Anchor.apply(logits_Nv), target_N, shard)
