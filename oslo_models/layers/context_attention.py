"""Attention of divided tokens: each rank computes some heads of all tokens.

Query, key and value of a rank's tokens are exchanged for some heads of all tokens, in one message. The output is
exchanged back. With fewer heads than ranks, each rank gathers the keys and values of all tokens instead.
Source: Jacobs et al., "DeepSpeed Ulysses", 2023.

Shapes: B rows, h heads, S tokens, d features of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oslo_models.distributed.autograd_collectives import exchange
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.context_parts import ContextPart
from oslo_models.layers.sharded_activation import ShardSpec
from oslo_models.sharding.layout import EvenSplit

HEADS, QUERIES = 1, 2
"""Dimensions of heads and tokens in query, key and value, ``[B, h, S, d]``."""


class AttentionInputs(NamedTuple):
    """Inputs of a rank's attention.

    Attributes:
        query, key, value, mask, bias: for this rank's heads of all tokens, or for all heads of this rank's queries.
        groups: number of local query heads for each local key head.
        is_causal: whether queries do not see later keys. ``mask`` is ``None`` then.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    bias: Any
    groups: int
    is_causal: bool


def has_parts(*tensors: Any) -> bool:
    """Return whether one of the tensors is a part of the tokens."""
    return any(isinstance(x, ContextPart) for x in tensors)


def attention_of_parts(
    attend: Callable[[AttentionInputs], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Any,
    is_causal: bool,
    heads_dim: int,
    bias: Any = None,
) -> Any:
    """Return the attention of parts of the tokens as a part, or ``NotImplemented`` for other shapes.

    Args:
        attend: attention of whole rows or of some queries. Its heads are in dimension ``heads_dim`` and its queries in
            the other one of 1 and 2.
        query, key, value: ``[B, h, S, d]``. Key and value may be whole.
        mask, bias: a mask and a bias of all queries and keys, or ``None``.
    """
    parts = [x for x in (query, key, value) if isinstance(x, ContextPart)]
    if any(x.dim() != 4 for x in (query, key, value)) or any(x.spec != _spec(x) for x in parts):
        return NotImplemented
    if not isinstance(query, ContextPart) or query.shape[HEADS] % key.shape[HEADS] or key.shape[1] != value.shape[1]:
        return NotImplemented
    mask, bias = (x.full("attention") if isinstance(x, ContextPart) else x for x in (mask, bias))
    if query.shape[HEADS] < query.tp.size:
        return _with_gathered_keys(attend, query, key, value, mask, is_causal, heads_dim, bias)
    split = _Heads(query.shape[HEADS], key.shape[HEADS], query.tp.size)
    rank = query.tp.rank
    own, own_keys = split.queries[rank], split.keys[rank]
    of_keys = [split.keys] * 2
    q, k, v = _heads_of_tokens(query.tp, (query, key, value), [split.queries, *of_keys])
    mask, bias = (
        x[:, own.start : own.stop] if isinstance(x, Tensor) and x.dim() == 4 and x.shape[HEADS] > 1 else x
        for x in (mask, bias)
    )
    with query.state.random_stream():
        output = attend(AttentionInputs(q, k, v, mask, bias, len(own) // len(own_keys), is_causal))
    local = _tokens_of_heads(query.tp, output, heads_dim, split.queries, query.sizes())
    tokens_dim = 3 - heads_dim
    length = query.full_shape[QUERIES]
    return ContextPart.of(local, query.state, ShardSpec(tokens_dim, length), length)


def _spec(x: ContextPart) -> ShardSpec:
    return ShardSpec(QUERIES, x.full_shape[QUERIES])


class _Heads:
    """Query and key heads of each rank.

    Attributes:
        queries: query heads of each rank.
        keys: key heads for them. A key head may be on several ranks, and several times on a rank.
    """

    def __init__(self, queries: int, keys: int, ranks: int) -> None:
        group = queries // keys
        unit = group if keys >= ranks else 1
        self.queries = [range(start, stop) for start, stop in EvenSplit(queries // unit, unit).ranges(ranks)]
        self.keys = [_keys_of(heads, group) for heads in self.queries]


def _keys_of(heads: range, group: int) -> Sequence[int]:
    first, last = heads.start // group, (heads.stop - 1) // group
    if first == last or (heads.start % group == 0 and heads.stop % group == 0):
        return range(first, last + 1)
    return [head // group for head in heads]


def _of_heads(x: Tensor, heads: Sequence[int]) -> Tensor:
    if isinstance(heads, range):
        return x.narrow(HEADS, heads.start, len(heads))
    return x.index_select(HEADS, torch.tensor(heads, device=x.device))


def _heads_of_tokens(axis: Axis, tensors: Sequence[Tensor], heads: Sequence[Sequence[Sequence[int]]]) -> list[Tensor]:
    """Return this rank's heads of all tokens of each tensor.

    Args:
        heads: for each tensor, the heads of each rank.
    """
    results: list[Tensor | None] = [None] * len(tensors)
    parts = [index for index, x in enumerate(tensors) if isinstance(x, ContextPart)]
    for index, x in enumerate(tensors):
        if index not in parts:
            results[index] = _of_heads(x, heads[index][axis.rank])
    for dtype in dict.fromkeys(tensors[index].dtype for index in parts):
        joined = [index for index in parts if tensors[index].dtype is dtype]
        local = [tensors[index].local() for index in joined]  # type: ignore[attr-defined]
        sizes = [tensors[index].sizes() for index in joined]  # type: ignore[attr-defined]
        pieces = [
            [_of_heads(x, heads[index][rank]).reshape(-1) for index, x in zip(joined, local, strict=True)]
            for rank in range(axis.size)
        ]
        shapes = [
            [
                (x.shape[0], len(heads[index][axis.rank]), lengths[rank], x.shape[3])
                for index, x, lengths in zip(joined, local, sizes, strict=True)
            ]
            for rank in range(axis.size)
        ]
        for index, received in zip(joined, zip(*_exchanged(axis, pieces, shapes), strict=True), strict=True):
            results[index] = torch.cat(received, QUERIES)
    return results  # type: ignore[return-value]


def _tokens_of_heads(
    axis: Axis, output: Tensor, heads_dim: int, heads: Sequence[range], sizes: Sequence[int]
) -> Tensor:
    """Return all heads of this rank's tokens. ``output`` has this rank's heads of all tokens."""
    tokens_dim = 3 - heads_dim
    pieces = [[x.reshape(-1)] for x in output.split(list(sizes), tokens_dim)]
    shapes = []
    for of_rank in heads:
        shape = list(output.shape)
        shape[heads_dim], shape[tokens_dim] = len(of_rank), sizes[axis.rank]
        shapes.append([tuple(shape)])
    return torch.cat([received for (received,) in _exchanged(axis, pieces, shapes)], heads_dim)


def _exchanged(
    axis: Axis, pieces: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """Send flat tensors to each rank in one message. Return the tensors from each rank with their shapes."""
    counts = [[torch.Size(shape).numel() for shape in of_rank] for of_rank in shapes]
    sent = [sum(len(piece) for piece in of_rank) for of_rank in pieces]
    message = torch.cat([piece for of_rank in pieces for piece in of_rank])
    (received,) = exchange(axis, (message,), sent, [sum(each) for each in counts])
    flat = iter(received.split([count for of_rank in counts for count in of_rank]))
    return [[next(flat).view(shape) for shape in of_rank] for of_rank in shapes]


def _with_gathered_keys(
    attend: Callable[[AttentionInputs], Tensor],
    query: ContextPart,
    key: Tensor,
    value: Tensor,
    mask: Any,
    is_causal: bool,
    heads_dim: int,
    bias: Any,
) -> ContextPart:
    """Return the attention of this rank's queries with the keys and values of all tokens."""
    key, value = (x.full("attention") if isinstance(x, ContextPart) else x for x in (key, value))
    length, sizes = query.full_shape[QUERIES], query.sizes()
    start = sum(sizes[: query.tp.rank])
    rows = slice(start, start + sizes[query.tp.rank])
    if mask is None and is_causal:
        positions = torch.arange(max(length, key.shape[QUERIES]), device=key.device)
        mask = positions[None, None, rows, None] >= positions[None, None, None, : key.shape[QUERIES]]
    elif isinstance(mask, Tensor) and mask.shape[-2] > 1:
        mask = mask[..., rows, :]
    if isinstance(bias, Tensor) and bias.shape[-2] > 1:
        bias = bias[..., rows, :]
    groups = query.shape[HEADS] // key.shape[HEADS]
    with query.state.random_stream():
        output = attend(AttentionInputs(query.local(), key, value, mask, bias, groups, False))
    return ContextPart.of(output, query.state, ShardSpec(3 - heads_dim, length), length)
