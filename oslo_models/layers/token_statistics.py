"""Log-probabilities and entropies of tokens, from hidden states and a vocabulary-parallel LM head.

Each rank computes its local logits for one chunk of rows at a time, and recomputes them in the backward pass.
Sources: Hsu et al., "Liger Kernel", 2024, section 3.2 (statistics chunk by chunk); Shoeybi et al., "Megatron-LM", 2019,
section 3 (statistics of sharded logits). Shapes: N rows, C rows of a chunk, H hidden, V tokens in the vocabulary, v
local tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oslo_kernels.language import wide
from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.distributed.sharded_tensor import local_tensor
from oslo_models.layers.cross_entropy import VocabShard

CHUNK_BYTES = 256 << 20
"""Largest memory of the logits of a chunk on one rank, in bytes."""


@dataclass(frozen=True)
class LogitScaling:
    """Scales products of hidden states and head to logits: ``softcap * tanh(product * scale / softcap) / temperature``.

    Attributes:
        scale: factor of the product.
        softcap: bound of the logits, or ``None`` for unbounded logits.
        temperature: divisor of the logits.
    """

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def apply(self, product: Tensor) -> Tensor:
        """Return the logits."""
        logits = product * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits / self.temperature

    def gradient(self, logits: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the product from the gradient of the logits."""
        if self.softcap is not None:
            grad = grad * (1 - (logits * self.temperature / self.softcap).square())
        return grad * (self.scale / self.temperature)


class TokenStatistics(NamedTuple):
    """Statistics of each row's distribution over the vocabulary, of shape ``[N]``. The first two have gradients."""

    log_probs: Tensor
    """Log-probability of the target."""
    entropy: Tensor
    log_sum_sq_probs: Tensor
    """Logarithm of the sum of the squared probabilities."""
    mean_logits: Tensor
    is_top1: Tensor
    """Whether the target is the first of the most likely tokens."""


def token_statistics(
    hidden_NH: Tensor,
    weight_vH: Tensor,
    bias_v: Tensor | None,
    target_N: Tensor,
    shard: VocabShard,
    scaling: LogitScaling | None = None,
) -> TokenStatistics:
    """Return statistics of the distributions ``softmax(scaling(hidden @ weight.T + bias))``.

    Computes in float32 or wider. The forward pass communicates two all-reduces of O(N) numbers, and the backward pass
    one all-reduce of ``hidden``'s gradient.

    Args:
        hidden_NH: hidden states, replicated. This operation all-reduces their gradient over the tp axis.
        weight_vH: local rows of the head's weight.
        bias_v: local shard of the head's bias.
        target_N: indices into the full vocabulary, replicated.
        shard: local shard of the vocabulary. Its cross-entropy options are not used.
        scaling: scaling of the product to logits.

    Raises:
        IndexError: a target is outside the vocabulary. On CUDA it is a device-side assertion.
    """
    known, wrong = ((target_N >= 0) & (target_N < shard.size)).all(), f"a target is not in [0, {shard.size})"
    if target_N.is_cuda:
        torch._assert_async(known, wrong)  # asynchronous
    elif not known:
        raise IndexError(wrong)
    return TokenStatistics(
        *_TokenStatistics.apply(hidden_NH, weight_vH, bias_v, target_N, shard, scaling or LogitScaling())
    )


class _TokenStatistics(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_vH: Tensor,
        bias_v: Tensor | None,
        target_N: Tensor,
        shard: VocabShard,
        scaling: LogitScaling,
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # an entropy that is only logged costs nothing in the backward pass
        ctx.dtype = computation_dtype(hidden_NH)
        ctx.shard, ctx.scaling = shard, scaling
        parts = [
            _local_statistics(logits_Cv, target_N[rows], shard)
            for rows, logits_Cv in logit_chunks(hidden_NH, weight_vH, bias_v, shard, scaling, ctx.dtype)
        ]
        own_max_N, before_N, *sums = (torch.cat(each) for each in zip(*parts, strict=True))
        max_N, before_N = reduce_fresh(shard.axis, torch.stack((own_max_N, before_N)), op=MAX)
        rescale_N = (own_max_N - max_N).exp()
        total_N, weighted_N, squares_N, sum_N, target_logit_N = reduce_fresh(
            shard.axis,
            torch.stack((sums[0] * rescale_N, sums[1] * rescale_N, sums[2] * rescale_N.square(), *sums[3:])),
        )
        log_total_N = max_N + total_N.log()
        entropy_N = log_total_N - weighted_N / total_N
        log_squares_N = squares_N.log() - 2 * total_N.log()
        is_top1_N = (target_logit_N >= max_N) & (target_logit_N > before_N)
        mean_N = sum_N / shard.size
        ctx.save_for_backward(hidden_NH, weight_vH, bias_v, target_N, log_total_N, entropy_N)
        ctx.mark_non_differentiable(log_squares_N, mean_N, is_top1_N)
        return target_logit_N - log_total_N, entropy_N, log_squares_N, mean_N, is_top1_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_log_prob_N: Tensor | None, grad_entropy_N: Tensor | None, *_: Any) -> Any:
        hidden_NH, weight_vH, bias_v, target_N, log_total_N, entropy_N = map(plain, ctx.saved_tensors)
        needs, sum_dtype = ctx.needs_input_grad, log_total_N.dtype
        grad_NH = torch.zeros_like(hidden_NH) if needs[0] else None
        grad_vH = torch.zeros_like(weight_vH, dtype=sum_dtype) if needs[1] else None
        grad_v = torch.zeros_like(bias_v, dtype=sum_dtype) if bias_v is not None and needs[2] else None
        for rows, logits_Cv in logit_chunks(hidden_NH, weight_vH, bias_v, ctx.shard, ctx.scaling, ctx.dtype):
            log_prob_Cv = logits_Cv - log_total_N[rows].unsqueeze(-1)
            grad_Cv = torch.zeros_like(logits_Cv)
            if grad_log_prob_N is not None:
                grad_C1 = grad_log_prob_N[rows].to(sum_dtype).unsqueeze(-1)
                grad_Cv -= grad_C1 * log_prob_Cv.exp()
                index_C1, is_elsewhere_C1 = _local_index(target_N[rows], ctx.shard)
                grad_Cv.scatter_add_(-1, index_C1, grad_C1.masked_fill(is_elsewhere_C1, 0.0))
            if grad_entropy_N is not None:
                surplus_Cv = log_prob_Cv + entropy_N[rows].unsqueeze(-1)
                grad_Cv -= grad_entropy_N[rows].to(sum_dtype).unsqueeze(-1) * log_prob_Cv.exp() * surplus_Cv
            product_Cv = ctx.scaling.gradient(logits_Cv, grad_Cv).to(ctx.dtype)
            if grad_NH is not None:
                grad_NH[rows] = (product_Cv @ weight_vH.to(ctx.dtype)).to(grad_NH.dtype)
            if grad_vH is not None:
                grad_vH += product_Cv.T @ hidden_NH[rows].to(ctx.dtype)
            if grad_v is not None:
                grad_v += product_Cv.sum(0, dtype=sum_dtype)
        if grad_NH is not None:
            grad_NH = reduce_fresh(ctx.shard.axis, grad_NH)
        of_weight = None if grad_vH is None else grad_vH.to(weight_vH.dtype)
        of_bias = None if grad_v is None or bias_v is None else grad_v.to(bias_v.dtype)
        return grad_NH, of_weight, of_bias, None, None, None


def plain(tensor: Any) -> Any:
    """Return the local shard of a sharded parameter as a plain tensor."""
    return None if tensor is None else local_tensor(tensor)


def computation_dtype(hidden_NH: Tensor) -> torch.dtype:
    """Return the type of a head's product: of autocast, or of the hidden states."""
    device = hidden_NH.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_NH.dtype
    return torch.promote_types(dtype, hidden_NH.dtype) if hidden_NH.dtype == torch.float64 else dtype


def logit_chunks(
    hidden_NH: Tensor,
    weight_vH: Tensor,
    bias_v: Tensor | None,
    shard: VocabShard,
    scaling: LogitScaling,
    dtype: torch.dtype,
) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each chunk and their local logits. There is at least one chunk, which may be empty.

    Args:
        dtype: type of the product.
    """
    weight_vH, bias_v = plain(weight_vH).to(dtype), None if bias_v is None else plain(bias_v).to(dtype)
    size = max(1, CHUNK_BYTES // (-(-shard.size // shard.axis.size) * wide(dtype).itemsize))
    for start in range(0, max(1, len(hidden_NH)), size):
        rows = slice(start, start + size)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            product_Cv = torch.nn.functional.linear(hidden_NH[rows].to(dtype), weight_vH, bias_v)
        yield rows, scaling.apply(product_Cv.to(wide(dtype)))


def _local_statistics(logits_Cv: Tensor, target_C: Tensor, shard: VocabShard) -> tuple[Tensor, ...]:
    """Return local maximum, maximum before the target, sums of exp, exp * logit, exp², logit, and the target's logit.

    The local maximum is subtracted from the logits before the exponential.
    """
    own_max_C = logits_Cv.amax(-1)
    exp_Cv = (logits_Cv - own_max_C.unsqueeze(-1)).exp()
    index_C1, is_elsewhere_C1 = _local_index(target_C, shard)
    target_logit_C = logits_Cv.gather(-1, index_C1).masked_fill(is_elsewhere_C1, 0.0).squeeze(-1)
    columns_v = torch.arange(*shard.local, device=logits_Cv.device)
    before_C = logits_Cv.masked_fill(columns_v >= target_C.unsqueeze(-1), float("-inf")).amax(-1)
    sums = (exp_Cv.sum(-1), (exp_Cv * logits_Cv).sum(-1), exp_Cv.square().sum(-1), logits_Cv.sum(-1))
    return own_max_C, before_C, *sums, target_logit_C


def _local_index(target_C: Tensor, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Return the targets' local columns, ``[C, 1]``, and whether they are on another rank. The column is then 0."""
    start, stop = shard.local
    is_elsewhere_C = (target_C < start) | (target_C >= stop)
    return (target_C - start).masked_fill(is_elsewhere_C, 0).unsqueeze(-1), is_elsewhere_C.unsqueeze(-1)
