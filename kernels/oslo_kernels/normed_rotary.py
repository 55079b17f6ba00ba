"""Root-mean-square norms of query and key heads, fused with rotary position embeddings in one launch.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Su et al., "RoFormer: Enhanced Transformer
with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels import norm_and_turn
from oslo_kernels.language import wide
from oslo_kernels.norm import result_dtype
from oslo_kernels.operation import operation
from oslo_kernels.rotary import turn


def _split(statistics: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
    """Split the scales of all heads into queries and keys, ``[batch, heads, length, 1]`` each."""
    scales = statistics.transpose(1, 2).unsqueeze(-1)
    return scales[:, : query.shape[1]], scales[:, query.shape[1] :]


@operation("oslo::normed_rotary", "b h l w", "b g l w", "b? l w", "b? l w", "w", "w")
def normed_rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize each head by its root mean square, multiply by ``weight + offset``, and apply the rotary position.

    Args:
        query, key: ``[batch, heads, length, width]`` of one dtype. The numbers of heads may differ.
        cos, sin: ``[batch or 1, length, width]``; without gradients.
        query_weight, key_weight: ``[width]``, of one dtype.
        keeps_dtype: whether the results keep the dtype of queries and keys even if the weights have a wider dtype.

    Returns:
        Queries, keys, and the scale of each head, ``[batch, length, query and key heads]``.
    """
    made, scales = [], []
    for x, weight in ((query, query_weight), (key, key_weight)):
        h = x.to(wide(x.dtype))
        scale = (h.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = h * scale * (weight.to(h.dtype) + offset)
        made.append(turn(normed, cos, sin).to(result_dtype(x.dtype, weight.dtype, keeps_dtype)))
        scales.append(scale.squeeze(-1))
    return made[0], made[1], torch.cat(scales, 1).transpose(1, 2).contiguous()


@operation(
    *("oslo::normed_rotary_backward", "b h l w", "b g l w", "b h l w", "b g l w", "b? l w", "b? l w"),
    *("w", "w", "b l h+g !"),
)
def normed_rotary_backward(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    statistics: Tensor,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and both weights from the gradients of the results."""
    both = zip((of_query, of_key), (query, key), (query_weight, key_weight), _split(statistics, query), strict=True)
    inputs, weights = [], []
    for grad, x, weight, scale in both:
        dtype = wide(x.dtype)
        dy, normed = turn(grad.to(dtype), cos, sin, True), x.to(dtype) * scale
        wdy = dy * (weight.to(dtype) + offset)
        inputs.append(((wdy - normed * (wdy * normed).mean(-1, keepdim=True)) * scale).to(x.dtype))
        weights.append((dy * normed).sum((0, 1, 2)).to(weight.dtype))
    return inputs[0], inputs[1], weights[0], weights[1]


@normed_rotary.register_fake
def _(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = result_dtype(query.dtype, query_weight.dtype, keeps_dtype)
    batch, heads, length, _ = query.shape
    statistics = query.new_empty((batch, length, heads + key.shape[1]), dtype=wide(query.dtype))
    return torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype), statistics


@normed_rotary_backward.register_fake
def _(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    statistics: Tensor,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = [torch.empty_like(x) for x in (query, key, query_weight, key_weight)]
    return made[0], made[1], made[2], made[3]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, _, ctx.offset, _ = inputs
    ctx.save_for_backward(*tensors, output[2])


def _backward(ctx: Any, of_query: Tensor, of_key: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    query, key, query_weight, key_weight = normed_rotary_backward(of_query, of_key, *ctx.saved_tensors, ctx.offset)
    return query, key, None, None, query_weight, key_weight, None, None, None


normed_rotary.register_autograd(_backward, setup_context=_setup)


@normed_rotary.register_kernel("cuda")
def normed_rotary_triton(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> Any:
    if not norm_and_turn.is_supported(query, key):
        return normed_rotary.plain(query, key, cos, sin, query_weight, key_weight, eps, offset, keeps_dtype)
    batch, heads, length, _ = query.shape
    statistics = query.new_empty((batch, length, heads + key.shape[1]), dtype=torch.float32)
    weights, numbers = (query_weight, key_weight), (eps, offset, 0.0, 0.0)
    return *norm_and_turn.run(query, key, (cos, sin), weights, statistics, numbers, keeps_dtype, False), statistics


@normed_rotary_backward.register_kernel("cuda")
def normed_rotary_backward_triton(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    statistics: Tensor,
    offset: float = 0.0,
) -> Any:
    if not norm_and_turn.is_supported(query, key, of_query, of_key):
        given = (of_query, of_key, query, key, cos, sin, query_weight, key_weight, statistics)
        return normed_rotary_backward.plain(*given, offset)
    weights, numbers = (query_weight, key_weight), (offset, 0.0, 0.0, 0.0)
    grads, tables = (of_query, of_key), (cos, sin)
    return norm_and_turn.run_backward(grads, query, key, tables, weights, statistics, statistics, numbers, False)
