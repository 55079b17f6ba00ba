"""Scale, mask and softmax of attention scores in one pass, for attention that returns its weights.

Source of the fusion: Shoeybi et al., "Megatron-LM", 2019. Unlike Megatron's kernel, it takes any length, dtype and
stride.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels.language import jit, launch, power_of_two, tl, wide
from oslo_kernels.operation import operation

HIDDEN = torch.finfo(torch.float32).min
"""The score of keys hidden by causality: a row with no visible key becomes uniform, as in transformers."""


def reference(scores: Tensor, mask: Tensor | None, scale: float, causal: bool) -> Tensor:
    """`masked_softmax` in plain torch."""
    h = scores.to(wide(scores.dtype)) * scale
    if mask is not None:
        h = h + mask
    if causal:
        queries, keys = scores.shape[-2:]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).tril(keys - queries)
        h = h.masked_fill(~visible, HIDDEN)
    return h.softmax(-1).to(scores.dtype)


@operation("oslo::masked_softmax", "b h q k", "...")
def masked_softmax(scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    """``softmax(scores * scale + mask)`` over the last dimension, computed at least in float32.

    Args:
        scores: ``[batch, heads, queries, keys]``. The result has the same dtype.
        mask: an additive mask of a floating dtype, broadcast to the scores: large negative numbers for hidden keys, or
            a bias.
        causal: the last query attends to all keys, each query before it to one less.
    """
    return reference(scores, mask, scale, causal)


@operation("oslo::softmax_backward", "*s k", "*s k")
def softmax_backward(grad: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Compute the gradient of the scores."""
    dy, y = grad.to(wide(weights.dtype)), weights.to(wide(weights.dtype))
    return ((dy - (dy * y).sum(-1, keepdim=True)) * y * scale).to(weights.dtype)


@masked_softmax.register_fake
def _(scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False) -> Tensor:
    return torch.empty_like(scores)


@softmax_backward.register_fake
def _(grad: Tensor, weights: Tensor, scale: float) -> Tensor:
    return torch.empty_like(weights)


def _setup(ctx: Any, inputs: Any, output: Tensor) -> None:
    _, mask, ctx.scale, _ = inputs
    ctx.mask = None if mask is None else (mask.shape, mask.dtype)
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    dx = softmax_backward(grad, *ctx.saved_tensors, ctx.scale)
    dmask = None
    if ctx.mask is not None and ctx.needs_input_grad[1]:  # a learned bias (T5)
        shape, dtype = ctx.mask
        dmask = dx.to(wide(dx.dtype)).sum_to_size(shape).div(ctx.scale).to(dtype)
    return dx, dmask, None, None


masked_softmax.register_autograd(_backward, setup_context=_setup)


@jit
def softmax_kernel(
    scores_ptr, mask_ptr, out_ptr, s_batch, s_head, s_query, m_batch, m_head, m_query, m_key, heads, queries, keys,
    scale, MASK: tl.constexpr, CAUSAL: tl.constexpr, SINGLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    query = row % queries
    head = (row // queries) % heads
    batch = row // queries // heads
    scores = scores_ptr + batch * s_batch + head * s_head + query * s_query
    masks = mask_ptr + batch * m_batch + head * m_head + query * m_query
    k = tl.arange(0, BLOCK)
    seen = query + keys - queries
    if SINGLE:
        x = tl.load(scores + k, mask=k < keys, other=0.0).to(tl.float32) * scale
        if MASK:
            x += tl.load(masks + k * m_key, mask=k < keys, other=0.0).to(tl.float32)
        if CAUSAL:
            x = tl.where(k <= seen, x, -3.4028234663852886e38)
        x = tl.where(k < keys, x, float("-inf"))
        x = tl.exp(x - tl.max(x, 0))
        tl.store(out_ptr + row * keys + k, x / tl.sum(x, 0), mask=k < keys)
    else:
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, keys, BLOCK):
            x = tl.load(scores + start + k, mask=start + k < keys, other=0.0).to(tl.float32) * scale
            if MASK:
                x += tl.load(masks + (start + k) * m_key, mask=start + k < keys, other=0.0).to(tl.float32)
            if CAUSAL:
                x = tl.where(start + k <= seen, x, -3.4028234663852886e38)
            x = tl.where(start + k < keys, x, float("-inf"))
            higher = tl.maximum(highest, x)
            base = tl.where(higher == float("-inf"), 0.0, higher)
            total = total * tl.exp(highest - base) + tl.exp(x - base)
            highest = higher
        top = tl.max(highest, 0)
        factor = 1.0 / tl.sum(total * tl.exp(highest - top), 0)
        for start in range(0, keys, BLOCK):
            x = tl.load(scores + start + k, mask=start + k < keys, other=0.0).to(tl.float32) * scale
            if MASK:
                x += tl.load(masks + (start + k) * m_key, mask=start + k < keys, other=0.0).to(tl.float32)
            if CAUSAL:
                x = tl.where(start + k <= seen, x, -3.4028234663852886e38)
            tl.store(out_ptr + row * keys + start + k, tl.exp(x - top) * factor, mask=start + k < keys)


@jit
def softmax_backward_kernel(
    grad_ptr, weights_ptr, out_ptr, keys, scale, SINGLE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * keys
    k = tl.arange(0, BLOCK)
    if SINGLE:
        dy = tl.load(grad_ptr + row + k, mask=k < keys, other=0.0).to(tl.float32)
        y = tl.load(weights_ptr + row + k, mask=k < keys, other=0.0).to(tl.float32)
        tl.store(out_ptr + row + k, (dy - tl.sum(dy * y, 0)) * y * scale, mask=k < keys)
    else:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, keys, BLOCK):
            dy = tl.load(grad_ptr + row + start + k, mask=start + k < keys, other=0.0).to(tl.float32)
            total += dy * tl.load(weights_ptr + row + start + k, mask=start + k < keys, other=0.0).to(tl.float32)
        dot = tl.sum(total, 0)
        for start in range(0, keys, BLOCK):
            dy = tl.load(grad_ptr + row + start + k, mask=start + k < keys).to(tl.float32)
            y = tl.load(weights_ptr + row + start + k, mask=start + k < keys).to(tl.float32)
            tl.store(out_ptr + row + start + k, (dy - dot) * y * scale, mask=start + k < keys)


LONGEST, PIECE = 8192, 4096
"""The longest row that one program holds, and the size of the pieces of longer rows, which are read twice."""


def blocks(keys: int) -> dict[str, Any]:
    """Return the launch constants for rows of this length."""
    block = power_of_two(keys, LONGEST) if keys <= LONGEST else PIECE
    return {"SINGLE": block >= keys, "BLOCK": block, "num_warps": max(1, min(8, block // 512))}


@masked_softmax.register_kernel("cuda")
def masked_softmax_triton(
    scores: Tensor, mask: Tensor | None = None, scale: float = 1.0, causal: bool = False
) -> Tensor:
    if scores.dtype == torch.float64 or not scores.numel():
        return reference(scores, mask, scale, causal)
    scores = scores if scores.stride(-1) == 1 else scores.contiguous()
    batch, heads, queries, keys = scores.shape
    out = torch.empty_like(scores, memory_format=torch.contiguous_format)
    wide_mask = scores if mask is None else mask.expand(scores.shape)
    flags = {"MASK": mask is not None, "CAUSAL": causal, **blocks(keys)}
    sizes = (*scores.stride()[:3], *wide_mask.stride(), heads, queries, keys, scale)
    launch(softmax_kernel, (batch * heads * queries,), scores, wide_mask, out, *sizes, **flags)
    return out


@softmax_backward.register_kernel("cuda")
def softmax_backward_triton(grad: Tensor, weights: Tensor, scale: float) -> Tensor:
    if weights.dtype == torch.float64 or not weights.numel():
        return softmax_backward.plain(grad, weights, scale)
    grad, weights, out = grad.contiguous(), weights.contiguous(), torch.empty_like(weights)
    keys = weights.shape[-1]
    launch(softmax_backward_kernel, (weights.numel() // keys,), grad, weights, out, keys, scale, **blocks(keys))
    return out
