"""Root-mean-square norms over all heads of queries and keys, and their rotary positions, in two launches.

`row_products` computes the sums of squares of the local heads. A rank with only some of the heads all-reduces them
between the two launches, and `full_norm_rotary` takes the totals. The backward pass has two launches too. For each row
it needs the dot product of the normed values and their gradients. Positions and weights are linear, so this equals the
dot product of the results and their gradients, and `row_products` computes it as well.

Sources: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019; Su et al., "RoFormer: Enhanced Transformer
with Rotary Position Embedding", 2021.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_kernels import norm_and_turn
from oslo_kernels.language import jit, launch, power_of_two, tl, wide
from oslo_kernels.norm import result_dtype
from oslo_kernels.operation import operation
from oslo_kernels.rotary import turn


@operation("oslo::row_products", "b h l w", "b h l w", "b g l w", "b g l w")
def row_products(query: Tensor, other_query: Tensor, key: Tensor, other_key: Tensor) -> Tensor:
    """Compute the dot products of two queries and of two keys over all local heads, at least in float32.

    Args:
        query, other_query, key, other_key: ``[batch, heads, length, width]``. Queries and keys may have different
            numbers of heads.

    Returns:
        ``[batch, length, 2]``. The operation has no backward pass.
    """
    pairs = ((query, other_query), (key, other_key))
    sums = [(x.to(wide(x.dtype)) * y.to(wide(x.dtype))).sum((1, 3)) for x, y in pairs]
    return torch.stack(sums, -1)


@row_products.register_fake
def _(query: Tensor, other_query: Tensor, key: Tensor, other_key: Tensor) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[2], 2), dtype=wide(query.dtype))


def _scaled(x: Tensor, squares: Tensor, count: int, eps: float) -> tuple[Tensor, Tensor]:
    """Return the normed values before the weight, and the scale ``[batch, 1, length, 1]``."""
    scale = (squares / count + eps).rsqrt()[:, None, :, None]
    return x.to(wide(x.dtype)) * scale, scale


def _heads_of(weight: Tensor, x: Tensor, offset: float) -> Tensor:
    """Return the weight plus the offset, ``[heads, 1, width]``."""
    return (weight.to(wide(x.dtype)) + offset).view(x.shape[1], 1, x.shape[3])


@operation("oslo::full_norm_rotary", "b h l w", "b g l w", "b? l w", "b? l w", "h*w", "g*w", "b l 2 !")
def full_norm_rotary(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    query_count: int,
    key_count: int,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> tuple[Tensor, Tensor]:
    """Normalize by the root mean square over all heads, multiply by ``weight + offset``, and apply rotary positions.

    Args:
        query, key: ``[batch, heads, length, width]`` of one dtype, the local heads.
        cos, sin: ``[batch or 1, length, width]``.
        query_weight, key_weight: ``[heads * width]``, of one dtype.
        squares: ``[batch, length, 2]``, the sums of squares over all query heads and over all key heads of a position.
        query_count, key_count: the numbers of elements in these sums.
        keeps_dtype: whether the results keep the dtype of queries and keys even if the weights have a wider dtype.

    Returns:
        Queries and keys. `full_norm_rotary_backward` computes the gradients. Its caller sums the products first.
    """
    made = []
    both = ((query, query_weight, query_count), (key, key_weight, key_count))
    for index, (x, weight, count) in enumerate(both):
        normed = _scaled(x, squares[..., index], count, eps)[0] * _heads_of(weight, x, offset)
        made.append(turn(normed, cos, sin).to(result_dtype(x.dtype, weight.dtype, keeps_dtype)))
    return made[0], made[1]


@full_norm_rotary.register_fake
def _(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, query_weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    dtype = result_dtype(query.dtype, query_weight.dtype, len(rest) > 6 and rest[6])
    return torch.empty_like(query, dtype=dtype), torch.empty_like(key, dtype=dtype)


@operation(
    *("oslo::full_norm_rotary_backward", "b h l w", "b g l w", "b h l w", "b g l w", "b? l w", "b? l w"),
    *("h*w", "g*w", "b l 2 !", "b l 2 !"),
)
def full_norm_rotary_backward(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    products: Tensor,
    query_count: int,
    key_count: int,
    eps: float,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of queries, keys and both weights.

    Args:
        products: ``[batch, length, 2]``, the sums over all heads of the results times their gradients.
    """
    inputs, weights = [], []
    both = ((of_query, query, query_weight, query_count), (of_key, key, key_weight, key_count))
    for index, (grad, x, weight, count) in enumerate(both):
        normed, scale = _scaled(x, squares[..., index], count, eps)
        dy, mean = turn(grad.to(normed.dtype), cos, sin, True), products[..., index][:, None, :, None] / count
        inputs.append(((dy * _heads_of(weight, x, offset) - normed * mean) * scale).to(x.dtype))
        weights.append((dy * normed).sum((0, 2)).flatten().to(weight.dtype))
    return inputs[0], inputs[1], weights[0], weights[1]


@full_norm_rotary_backward.register_fake
def _(of_query: Tensor, of_key: Tensor, query: Tensor, key: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in (query, key, rest[2], rest[3]))


@jit
def _row_product(
    x_ptr, y_ptr, x_head, y_head, heads, SQUARE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, BLOCK)[None, :]
    total = tl.zeros((HEADS, BLOCK), tl.float32)
    for first in range(0, heads, HEADS):
        head = (first + tl.arange(0, HEADS))[:, None].to(tl.int64)
        inside = (head < heads) & (d < WIDTH)
        x = tl.load(x_ptr + head * x_head + d, mask=inside, other=0.0).to(tl.float32)
        if SQUARE:
            total += x * x
        else:
            total += x * tl.load(y_ptr + head * y_head + d, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(total, 1), 0)


@jit
def row_products_kernel(
    q_ptr, q_other_ptr, k_ptr, k_other_ptr, statistics_ptr,
    q_batch, q_head, q_position, q_other_batch, q_other_head, q_other_position,
    k_batch, k_head, k_position, k_other_batch, k_other_head, k_other_position, length, q_heads, k_heads,
    SQUARE: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // length, row % length
    if tl.program_id(1) == 0:
        q = q_ptr + batch * q_batch + position * q_position
        other = q_other_ptr + batch * q_other_batch + position * q_other_position
        product = _row_product(q, other, q_head, q_other_head, q_heads, SQUARE, WIDTH, HEADS, BLOCK)
        tl.store(statistics_ptr + row * 2, product)
    else:
        k = k_ptr + batch * k_batch + position * k_position
        other = k_other_ptr + batch * k_other_batch + position * k_other_position
        product = _row_product(k, other, k_head, k_other_head, k_heads, SQUARE, WIDTH, HEADS, BLOCK)
        tl.store(statistics_ptr + row * 2 + 1, product)


@row_products.register_kernel("cuda")
def row_products_triton(query: Tensor, other_query: Tensor, key: Tensor, other_key: Tensor) -> Tensor:
    tensors = (query, other_query, key, other_key)
    if query.dtype == torch.float64 or any(x.stride(-1) != 1 or not x.numel() for x in tensors):
        products: Tensor = row_products.plain(*tensors)
        return products
    (batch, heads, length, width), key_heads = query.shape, key.shape[1]
    products = query.new_empty((batch, length, 2), dtype=torch.float32)
    block = power_of_two(width, 1 << 20)
    flags = {"WIDTH": width, "BLOCK": block, "HEADS": power_of_two(max(heads, key_heads), max(1, 4096 // block))}
    flags["SQUARE"] = query is other_query and key is other_key
    strides = [stride for x in tensors for stride in x.stride()[:3]]
    grid = (batch * length, 2)
    launch(row_products_kernel, grid, *tensors, products, *strides, length, heads, key_heads, **flags)
    return products


@full_norm_rotary.register_kernel("cuda")
def full_norm_rotary_triton(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    query_count: int,
    key_count: int,
    eps: float,
    offset: float = 0.0,
    keeps_dtype: bool = False,
) -> Any:
    weights = (query_weight, key_weight)
    if not norm_and_turn.is_supported(query, key):
        given = (query, key, cos, sin, *weights, squares, query_count, key_count, eps, offset, keeps_dtype)
        return full_norm_rotary.plain(*given)
    numbers = (eps, offset, float(query_count), float(key_count))
    return norm_and_turn.run(query, key, (cos, sin), weights, squares, numbers, keeps_dtype, True)


@full_norm_rotary_backward.register_kernel("cuda")
def full_norm_rotary_backward_triton(
    of_query: Tensor,
    of_key: Tensor,
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    squares: Tensor,
    products: Tensor,
    query_count: int,
    key_count: int,
    eps: float,
    offset: float = 0.0,
) -> Any:
    weights = (query_weight, key_weight)
    if not norm_and_turn.is_supported(query, key, of_query, of_key):
        given = (of_query, of_key, query, key, cos, sin, *weights, squares, products, query_count, key_count, eps)
        return full_norm_rotary_backward.plain(*given, offset)
    numbers = (offset, float(query_count), float(key_count), eps)
    grads, tables = (of_query, of_key), (cos, sin)
    return norm_and_turn.run_backward(grads, query, key, tables, weights, squares, products, numbers, True)
