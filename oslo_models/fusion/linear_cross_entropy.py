"""The LM head's product and the cross entropy in one operation, chunk by chunk, so that the full logits never exist.

The vocabulary may be sharded over the tp axis. Source of computing the gradients chunk by chunk in the forward pass:
Hsu et al., "Liger Kernel", 2024, section 3.2. Shapes: N rows, C rows of a chunk, H hidden, V tokens in the vocabulary,
v tokens on this rank, w the same with padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.cross_entropy import Rule, padded_logits, padded_weight, replace_by_gradient_, row_statistics
from oslo_kernels.language import wide
from oslo_kernels.linear import SPLIT, FasterRows, multiply_into
from oslo_models.distributed.collectives import reduce_fresh
from oslo_models.layers.cross_entropy import VocabShard

CHUNK_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
"""The maximum memory for the logits of a chunk, by type of device."""
CHUNKS, FAST_ROWS, SPLIT_ROWS = 16, 256, 512
"""On a CPU, a batch is split into `CHUNKS` chunks, or fewer if chunks would be too short for fast matrix products.

`FAST_ROWS` and, with AMX, `SPLIT_ROWS` limit how short they are. On a GPU, chunks are as long as their memory allows:
each chunk launches five kernels (some more under tensor parallelism), and reads and writes the weight gradient.
"""


def linear_cross_entropy(
    hidden_NH: Tensor,
    weight_vH: Tensor,
    bias_v: Tensor | None,
    target_N: Tensor,
    shard: VocabShard,
    scale: float = 1.0,
    cap: float = 0.0,
    mean: bool = False,
    faster: FasterRows | None = None,
) -> Tensor:
    """Return the cross entropy of the head's logits, summed over the rows that are not ignored, as a scalar.

    The forward pass computes the gradients, so the loss can be differentiated once. Half precision is summed in
    float32. Each chunk needs two all-reduces of O(rows) numbers, and the backward pass one of the gradient of
    ``hidden``.

    Args:
        hidden_NH: the hidden states, replicated on every rank. This operation all-reduces their gradient over the tp
            axis, in place, so it is replicated too.
        weight_vH: this rank's rows of the head's weight.
        bias_v: this rank's part of the head's bias.
        target_N: indices into the full vocabulary, the same on every rank.
        shard: this rank's shard of the vocabulary, and the handling of targets.
        scale, cap: logits are ``x = scale * (hidden @ weight.T + bias)``, or ``cap * tanh(x)`` unless ``cap`` is zero.
        mean: return the mean over these rows instead of the sum.
        faster: the implementation of products with the weight, the same on all ranks.

    Raises:
        IndexError: a target is neither in the vocabulary nor ``ignore_index``. On CUDA this is a device-side assertion,
            as in torch's cross entropy. The next synchronisation reports it.
    """
    # If the number of rows is known without waiting for a device, compute the gradient of the mean directly: the
    # backward pass then needs no multiplication.
    counted = mean and not target_N.is_cuda
    given = (target_N, shard, scale, cap, counted, faster)
    loss = _LinearCrossEntropy.apply(hidden_NH, weight_vH, bias_v, *given)
    return loss / (target_N != shard.ignore_index).sum() if mean and not counted else loss


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_vH: Tensor,
        bias_v: Tensor | None,
        target_N: Tensor,
        shard: VocabShard,
        scale: float,
        cap: float,
        mean: bool,
        faster: FasterRows | None,
    ) -> Tensor:
        rows = None
        shard.check(target_N)
        if not target_N.is_cuda:
            rows = (target_N != shard.ignore_index).nonzero().squeeze(-1)  # ignored rows cost nothing
            target_N = target_N[rows]
        factor = 1 / max(1, len(target_N)) if mean else 1.0
        rule = shard.rule(scale=scale, cap=cap, padded=hidden_NH.is_cuda, factor=factor)
        with torch.autocast(hidden_NH.device.type, enabled=False):
            needs = ctx.needs_input_grad
            loss, ctx.grads = _run(hidden_NH, weight_vH, bias_v, target_N, rows, shard, rule, needs, faster)
        ctx.axis = shard.axis
        return loss / len(target_N) if mean else loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError(
                "the loss of a fused model can be differentiated once, since its gradients are computed in the forward "
                "pass and released by the first backward: call the model again, or undo model.fuse() by model.unfuse()"
            )
        grads, ctx.grads = ctx.grads, None
        for own in grads:
            if own is not None and (grad.is_cuda or grad != 1):  # on a CPU the comparison is cheaper than the product
                own.mul_(grad)
        if grads[0] is not None:
            grads[0] = reduce_fresh(ctx.axis, grads[0])
        return (*grads, *[None] * 6)


def _run(
    hidden_NH: Tensor,
    weight_vH: Tensor,
    bias_v: Tensor | None,
    target_N: Tensor,
    rows: Tensor | None,
    shard: VocabShard,
    rule: Rule,
    needs: tuple[bool, ...],
    faster: FasterRows | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the summed loss and its gradients on this rank: of hidden states, weight and bias.

    Args:
        rows: the indices of the rows that are not ignored; ``None``: all rows.
        needs: whether each gradient is required.
    """
    dtype = weight_vH.dtype
    sum_dtype = wide(dtype)
    size = _rows_at_once(len(target_N), weight_vH, shard, faster)
    way = None if faster is None else faster.way(size, dtype)
    grad_NH = (torch.empty_like if rows is None else torch.zeros_like)(hidden_NH) if needs[0] else None
    grad_wH: Tensor | None = None
    grad_v = torch.zeros_like(bias_v, dtype=sum_dtype) if bias_v is not None and needs[2] else None
    losses = [hidden_NH.new_zeros(1, dtype=sum_dtype)]
    weight_wH = padded_weight(weight_vH)
    buffer = padded_logits(weight_vH, min(size, len(target_N)))
    for start in range(0, len(target_N), size):
        here = min(size, len(target_N) - start)
        target_C = target_N.narrow(0, start, here)
        logits_Cw = buffer[:here, : len(weight_wH)]
        logits_Cv = logits_Cw[:, : len(weight_vH)]
        index_C = None if rows is None else rows.narrow(0, start, here)
        hidden_CH = hidden_NH.narrow(0, start, here) if index_C is None else hidden_NH[index_C]
        multiply_into(logits_Cw, hidden_CH, weight_wH.T, way)
        if bias_v is not None:
            logits_Cv += bias_v
        losses.append(_loss_and_gradient(logits_Cv, target_C, shard, rule, any(needs)))
        if grad_NH is not None and index_C is None:
            multiply_into(grad_NH.narrow(0, start, here), logits_Cw, weight_wH, way)
        elif grad_NH is not None:
            grad_NH[index_C] = multiply_into(torch.empty_like(hidden_CH), logits_Cw, weight_wH, way)
        if needs[1]:
            grad_wH = _plus_product(grad_wH, logits_Cw.T, hidden_CH, sum_dtype, way)
        if grad_v is not None:
            grad_v += logits_Cv.sum(0, dtype=sum_dtype)
    if needs[1] and grad_wH is None:  # every row is ignored
        grad_wH = torch.zeros_like(weight_vH)
    grad_vH = None if grad_wH is None else grad_wH[: len(weight_vH)]
    return torch.cat(losses).sum(), [grad if grad is None else grad.to(dtype) for grad in (grad_NH, grad_vH, grad_v)]


def _plus_product(
    total: Tensor | None, left: Tensor, right: Tensor, dtype: torch.dtype, way: str | None = None
) -> Tensor:
    """Add ``left @ right`` to ``total`` in ``dtype``, in place. On a GPU the product itself adds in this dtype."""
    if left.is_cuda and left.dtype != dtype:
        total = left.new_zeros(len(left), right.shape[1], dtype=dtype) if total is None else total
        return torch.addmm(total, left, right, out_dtype=dtype, out=total)
    if left.dtype != dtype:
        return (left @ right).to(dtype) if total is None else total.add_(left @ right)
    if total is None:  # write a large matrix once instead of clearing, reading and writing it
        return multiply_into(left.new_empty(len(left), right.shape[1]), left, right, way)
    return multiply_into(total, left, right, way, add=True)


def _rows_at_once(rows: int, weight_vH: Tensor, shard: VocabShard, faster: FasterRows | None = None) -> int:
    """Return the number of rows of a chunk: the same on every rank, even if the vocabulary is sharded unevenly."""
    most_bytes = CHUNK_BYTES.get(weight_vH.device.type, CHUNK_BYTES["cuda"])
    most = most_bytes // (-(-shard.size // shard.axis.size) * weight_vH.itemsize)
    if weight_vH.is_cuda:
        return max(1, min(rows, -(-rows // max(1, -(-rows // max(1, most))))))  # chunks of one length
    fast = max(FAST_ROWS, rows // CHUNKS)
    if weight_vH.is_cpu:  # every chunk rewrites the weight gradient, so a large gradient needs longer chunks
        fast = 2 * fast if shard.axis.size == 1 else (fast + 1) // 2
        if faster is not None and faster.many == SPLIT:  # it packs the weight again for each chunk
            fast = max(SPLIT_ROWS, fast)
    return max(1, min(most, fast))


def _loss_and_gradient(
    logits_Cv: Tensor, target_C: Tensor, shard: VocabShard, rule: Rule, differentiate: bool
) -> Tensor:
    """Return the losses of a chunk. If differentiating, replace its logits by their gradient."""
    statistics_4C = shard.combined(row_statistics(logits_Cv, target_C, rule))
    if not differentiate:
        return rule.losses(statistics_4C, target_C)
    return replace_by_gradient_(logits_Cv, statistics_4C, target_C, rule)
