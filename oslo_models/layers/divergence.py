"""Divergence between the distributions of two models over the next token, from vocabulary-parallel LM heads.

Each rank computes its local logits for one chunk of rows at a time, and recomputes them in the backward pass.
Source: Agarwal et al., "On-Policy Distillation of Language Models", 2023, equation 1 (generalised Jensen-Shannon
divergence). Shapes: N rows, C rows of a chunk, H hidden (of each model), v local tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.cross_entropy import VocabShard
from oslo_models.layers.token_statistics import LogitScaling, computation_dtype, logit_chunks, plain


@dataclass(frozen=True)
class Predictor:
    """The last steps of one model: hidden states and LM head.

    Attributes:
        hidden: hidden states, ``[N, H]``, replicated.
        weight: local rows of the head's weight, ``[v, H]``.
        bias: local shard of the head's bias, ``[v]``.
        scaling: scaling of the product to logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    scaling: LogitScaling


class Divergence(NamedTuple):
    """Statistics of each row, of shape ``[N]``. Only the divergence has gradients."""

    divergence: Tensor
    entropy: Tensor
    """Of the student's distribution, in nats."""


def divergence(student: Predictor, teacher: Predictor, shard: VocabShard, beta: float) -> Divergence:
    """Return the divergence of the student's distributions from the teacher's.

    Computes in float32 or wider. The forward pass communicates three small all-reduces for each chunk of rows, and the
    backward pass one all-reduce of the gradient of the student's hidden states. The teacher gets no gradients.

    Args:
        shard: local shard of the vocabulary, the same for both models. Its cross-entropy options are not used.
        beta: 0 for ``KL(teacher || student)``, 1 for ``KL(student || teacher)``. Values between them mix the two
            distributions, with this weight of the teacher.
    """
    given = student.hidden, student.weight, student.bias
    return Divergence(*_Divergence.apply(*given, student.scaling, teacher, shard, beta))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_vH: Tensor,
        bias_v: Tensor | None,
        scaling: LogitScaling,
        teacher: Predictor,
        shard: VocabShard,
        beta: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.scaling, ctx.teacher, ctx.shard, ctx.beta = scaling, teacher, shard, beta
        ctx.dtype = torch.promote_types(computation_dtype(hidden_NH), computation_dtype(teacher.hidden))
        ctx.save_for_backward(hidden_NH, weight_vH, bias_v)
        student = Predictor(hidden_NH, weight_vH, bias_v, scaling)
        found = []
        for _, logits_Cv, teacher_logits_Cv in _logits(student, teacher, shard, ctx.dtype):
            total_C1, teacher_total_C1 = _log_totals(shard.axis, logits_Cv, teacher_logits_Cv)
            log_q_Cv, log_p_Cv = logits_Cv - total_C1, teacher_logits_Cv - teacher_total_C1
            q_Cv, gap_Cv = log_q_Cv.exp(), _gap(log_q_Cv, log_p_Cv, beta)
            mean_gap_C = (q_Cv * gap_Cv).sum(-1)
            local_C = mean_gap_C
            if beta < 1:
                log_m_Cv = _mixture(log_q_Cv, log_p_Cv, beta) if beta else log_q_Cv
                of_teacher_C = (log_p_Cv.exp() * (log_p_Cv - log_m_Cv)).sum(-1)
                local_C = mean_gap_C + beta * of_teacher_C if beta else of_teacher_C
            entropy_C = -(q_Cv * log_q_Cv).sum(-1)
            sums = reduce_fresh(shard.axis, torch.stack((local_C, entropy_C, mean_gap_C)))
            found.append(torch.cat((sums, total_C1.T, teacher_total_C1.T)))
        divergence_N, entropy_N, ctx.mean_gap_N, ctx.total_N, ctx.teacher_total_N = torch.cat(found, 1)
        ctx.mark_non_differentiable(entropy_N)
        return divergence_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, *_: Any) -> Any:
        none = (None,) * 4
        if grad_N is None:
            return None, None, None, *none
        hidden_NH, weight_vH, bias_v = ctx.saved_tensors
        needs, shard, beta = ctx.needs_input_grad, ctx.shard, ctx.beta
        local_vH, sum_dtype = plain(weight_vH), ctx.total_N.dtype
        grad_NH = torch.zeros_like(hidden_NH)
        grad_vH = torch.zeros_like(local_vH, dtype=sum_dtype) if needs[1] else None
        grad_v = torch.zeros_like(plain(bias_v), dtype=sum_dtype) if bias_v is not None and needs[2] else None
        student = Predictor(hidden_NH, weight_vH, bias_v, ctx.scaling)
        for rows, logits_Cv, teacher_logits_Cv in _logits(student, ctx.teacher, shard, ctx.dtype):
            log_q_Cv = logits_Cv - ctx.total_N[rows, None]
            log_p_Cv = teacher_logits_Cv - ctx.teacher_total_N[rows, None]
            if beta:
                grad_Cv = log_q_Cv.exp() * (_gap(log_q_Cv, log_p_Cv, beta) - ctx.mean_gap_N[rows, None])
            else:
                grad_Cv = log_q_Cv.exp() - log_p_Cv.exp()
            grad_Cv = ctx.scaling.gradient(logits_Cv, grad_Cv * grad_N[rows, None]).to(ctx.dtype)
            grad_NH[rows] = (grad_Cv @ local_vH.to(ctx.dtype)).to(grad_NH.dtype)
            if grad_vH is not None:
                grad_vH += grad_Cv.T @ hidden_NH[rows].to(ctx.dtype)
            if grad_v is not None:
                grad_v += grad_Cv.sum(0, dtype=sum_dtype)
        of_weight = None if grad_vH is None else grad_vH.to(local_vH.dtype)
        of_bias = None if grad_v is None else grad_v.to(plain(bias_v).dtype)
        return reduce_fresh(shard.axis, grad_NH), of_weight, of_bias, *none


def _logits(
    student: Predictor, teacher: Predictor, shard: VocabShard, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the rows of each chunk, and the local logits of both models."""
    chunks = [
        logit_chunks(each.hidden, each.weight, each.bias, shard, each.scaling, dtype) for each in (student, teacher)
    ]
    for (rows, logits_Cv), (_, teacher_logits_Cv) in zip(*chunks, strict=True):
        yield rows, logits_Cv, teacher_logits_Cv


def _log_totals(axis: Axis, *logits: Tensor) -> list[Tensor]:
    """Return the logarithm of the sum of the exponentials over the full vocabulary, ``[C, 1]`` each."""
    most_2C1 = reduce_fresh(axis, torch.stack([each.amax(-1, keepdim=True) for each in logits]), op=MAX)
    sums = [(each - most).exp().sum(-1, keepdim=True) for each, most in zip(logits, most_2C1, strict=True)]
    return list(most_2C1 + reduce_fresh(axis, torch.stack(sums)).log())


def _mixture(log_q_Cv: Tensor, log_p_Cv: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(log_q_Cv + math.log1p(-beta), log_p_Cv + math.log(beta))


def _gap(log_q_Cv: Tensor, log_p_Cv: Tensor, beta: float) -> Tensor:
    """Return the derivative of the divergence by the student's probabilities, up to a constant of each row."""
    if beta == 1:
        return log_q_Cv - log_p_Cv
    return (1 - beta) * (log_q_Cv - _mixture(log_q_Cv, log_p_Cv, beta)) if beta else torch.zeros_like(log_q_Cv)
