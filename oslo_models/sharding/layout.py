"""Layouts of tensors that are sharded over the ranks of an axis. Pure functions of shapes, without communication.

For every layout, the shards of all ranks restore the full tensor bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from oslo_models.sharding.shares import NestedRanks, rank_count, share_groups, share_ranges, shares_of
from oslo_models.sharding.shares import Range as Range
from oslo_models.sharding.shares import even_ranges as even_ranges

Index = tuple[slice, ...]


@dataclass(frozen=True)
class EvenSplit:
    """Splits a dimension of ``count`` indivisible units of ``width`` elements as evenly as possible.

    Ranks with shares (`WeightedRanks`) get units in the ratio of their shares.
    """

    count: int
    width: int = 1

    def max_ranks(self) -> int:
        """Return the largest number of ranks that can share the dimension."""
        return self.count

    def extent(self) -> int:
        """Return the full size of the dimension, in elements."""
        return self.count * self.width

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        """Return the range of units of each of ``n`` ranks. Ranges overlap if key-value heads are replicated."""
        return share_ranges(self.count, n)

    def ranges(self, n: int) -> tuple[Range, ...]:
        """Return the range of elements of each of ``n`` ranks."""
        return tuple((start * self.width, stop * self.width) for start, stop in self.unit_ranges(n))

    def local_count(self, n: int, rank: int) -> int:
        """Return the number of units on ``rank``."""
        start, stop = self.unit_ranges(n)[rank]
        return stop - start

    def local_extent(self, n: int, rank: int) -> int:
        """Return the number of elements on ``rank``."""
        return self.local_count(n, rank) * self.width

    def over_experts(self, groups: int) -> EvenSplit:
        """Return a copy with experts divided over ``groups`` groups of ranks. Other splits return ``self``."""
        return self


@dataclass(frozen=True)
class ExpertWidth(EvenSplit):
    """Splits the width of one expert. The experts may be divided over groups of consecutive ranks.

    The ranks of a group share the width of its experts. The other ranks have empty ranges.

    Attributes:
        expert: number of the expert.
        experts: number of all experts.
        groups: number of groups of ranks over which the experts are divided.
    """

    expert: int = 0
    experts: int = 1
    groups: int = 1

    def max_ranks(self) -> int:
        return self.count * self.groups

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        check_groups(self.groups, self.experts, n)
        share = n if self.groups == 1 else n // self.groups
        own = share_ranges(self.count, share)
        held = [start <= self.expert < stop for start, stop in even_ranges(self.experts, self.groups)]
        return tuple(own[rank % share] if held[rank // share] else (0, 0) for rank in range(n))

    def over_experts(self, groups: int) -> EvenSplit:
        return replace(self, groups=groups)


def check_groups(groups: int, experts: int, n: int) -> None:
    """Raise ``ValueError`` if the experts cannot be divided over ``groups`` groups of ``n`` ranks."""
    if groups > experts:
        raise ValueError(f"expert_parallel_size={groups} is more than {experts}, the number of experts")
    if groups > n:
        raise ValueError(
            f"expert_parallel_size={groups} divides experts over the ranks of several replicas, but layers of this "
            f"kind send no token to other replicas or context-parallel ranks: use at most tensor_parallel_size={n}"
        )


@dataclass(frozen=True)
class GroupedHeads:
    """Splits the heads of grouped-query attention: ``query_heads / kv_heads`` query heads share a key-value head.

    If there are enough key-value heads, each rank gets complete groups. With more ranks than key-value heads, each
    key-value head is replicated on several ranks, and these split the query heads of its group. So the ratio of query
    to key-value heads is an integer on every rank, as attention implementations require.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023.
    """

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """Number of query heads that share one key-value head."""
        return self.query_heads // self.kv_heads

    @property
    def query(self) -> EvenSplit:
        """Split of a query projection."""
        return _Heads(self.query_heads, self.head_dim, groups=self, kv=False)

    @property
    def key_value(self) -> EvenSplit:
        """Split of a key or a value projection."""
        return _Heads(self.kv_heads, self.head_dim, groups=self, kv=True)

    @property
    def interleaved(self) -> tuple[EvenSplit, ...]:
        """Splits of a fused matrix that stores query heads, key head and value head of each group in this order."""
        splits: list[EvenSplit] = []
        for group in range(self.kv_heads):
            query = _Heads(self.group, self.head_dim, groups=self, kv=False, first=group * self.group)
            splits += [query, *[_Heads(1, self.head_dim, groups=self, kv=True, first=group)] * 2]
        return tuple(splits)

    def head_ranges(self, n: int) -> tuple[tuple[Range, Range], ...]:
        """Return, for each rank, its range of query heads and its range of key-value heads."""
        if isinstance(n, NestedRanks):
            return n.in_order([self._divided(*held, n.inner) for held in self.head_ranges(n.outer)])
        if n <= self.kv_heads:
            kv = share_ranges(self.kv_heads, n)
            return tuple(((a * self.group, b * self.group), (a, b)) for a, b in kv)
        pairs = []
        shares = shares_of(n)
        for kv_head, (first, last) in enumerate(share_groups(n, self.kv_heads, self.group)):
            for a, b in share_ranges(self.group, rank_count(last - first, shares[first:last])):
                pairs.append(((kv_head * self.group + a, kv_head * self.group + b), (kv_head, kv_head + 1)))
        return tuple(pairs)

    def _divided(self, query: Range, kv: Range, n: int) -> tuple[tuple[Range, Range], ...]:
        """Divide the heads of a rank over ``n`` ranks."""
        (q, q_stop), (k, k_stop) = query, kv
        local = replace(self, query_heads=q_stop - q, kv_heads=k_stop - k).head_ranges(n)
        return tuple(((q + a, q + b), (k + c, k + d)) for (a, b), (c, d) in local)

    def local_ratio(self, n: int, rank: int) -> int:
        """Return the query heads per key-value head on ``rank`` (``num_key_value_groups`` of an attention module)."""
        (q_start, q_stop), (kv_start, kv_stop) = self.head_ranges(n)[rank]
        return (q_stop - q_start) // (kv_stop - kv_start)


@dataclass(frozen=True, kw_only=True)
class _Heads(EvenSplit):
    """Splits query or key-value heads from number ``first`` on. Ranks without these heads have empty ranges."""

    groups: GroupedHeads
    kv: bool
    first: int = 0

    def max_ranks(self) -> int:
        return self.groups.query_heads

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        ranges = [pair[self.kv] for pair in self.groups.head_ranges(n)]
        return _clipped([(start - self.first, stop - self.first) for start, stop in ranges], self.count)


@dataclass(frozen=True, kw_only=True)
class Window(EvenSplit):
    """Splits a part of a larger dimension. Each rank holds the intersection of its range with the part.

    Attributes:
        whole: split of the larger dimension.
        first: first element of the part. The part has ``count`` elements.
    """

    whole: EvenSplit
    first: int

    def max_ranks(self) -> int:
        return self.whole.max_ranks()

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        ranges = self.whole.ranges(n)
        return _clipped([(start - self.first, stop - self.first) for start, stop in ranges], self.count)


def _clipped(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """Intersect each range with ``[0, count)``."""
    clipped = [(max(start, 0), min(stop, count)) for start, stop in ranges]
    return tuple((start, stop) if start < stop else (0, 0) for start, stop in clipped)


@dataclass(frozen=True)
class Layout:
    """Layout of a full tensor over ranks: the elements of each local shard.

    Attributes:
        shape: full (global) shape.
        dim: sharded dimension, or ``None`` if the tensor is replicated.
        ranges: for each rank, its ranges of ``dim`` in the order of the local shard. Empty if ``dim`` is ``None``.
            A rank has several ranges if a weight concatenates several matrices (fused query-key-value).
        first_ranges: for each rank, its ranges of dimension 0 if that dimension is sharded beside ``dim``. Experts are
            sharded over groups of ranks, and the width of each expert over the ranks of a group.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[Range, ...], ...] = ()
    first_ranges: tuple[tuple[Range, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        for group in set(self._firsts):
            ranks = [rank for rank, first in enumerate(self._firsts) if first == group]
            self._check_cover([interval for rank in ranks for interval in self.ranges[rank]], self.dim)
        if self.first_ranges:
            self._check_cover([interval for local in self.first_ranges for interval in local], 0)

    def _check_cover(self, intervals: Sequence[Range], dim: int) -> None:
        covered = 0
        for start, stop in sorted(intervals):
            if start <= covered:
                covered = max(covered, stop)
        if covered != self.shape[dim]:
            raise ValueError(f"ranges {intervals} do not cover dimension {dim} of shape {self.shape}")

    @property
    def _firsts(self) -> tuple[tuple[Range, ...] | None, ...]:
        return self.first_ranges or (None,) * len(self.ranges)

    @classmethod
    def sharded(cls, shape: Sequence[int], dim: int, splits: Sequence[EvenSplit], n: int) -> Layout:
        """Shard ``dim`` over ``n`` ranks.

        Args:
            splits: one split per matrix that is concatenated along ``dim``.

        Raises:
            ValueError: the extents of the splits do not add up to the size of ``dim``.
        """
        shape = tuple(shape)
        extents = [split.extent() for split in splits]
        if sum(extents) != shape[dim]:
            raise ValueError(f"extents {extents} do not add up to dimension {dim} of shape {shape}")
        per_split = []
        offset = 0
        for split, extent in zip(splits, extents, strict=True):
            per_split.append([(offset + start, offset + stop) for start, stop in split.ranges(n)])
            offset += extent
        per_rank = zip(*per_split, strict=True)
        return cls(shape, dim, tuple(tuple(r for r in local if r[0] < r[1]) or local[:1] for local in per_rank))

    def over_groups(self, firsts: Sequence[Range], share: int) -> Layout:
        """Return the layout over groups of ranks. Each group shards a range of dimension 0 like this layout.

        Args:
            firsts: the range of each group.
            share: number of ranks of this layout, and of each group.
        """
        own = tuple((first,) for first in firsts for _ in range(share))
        if share == 1 or self.dim is None:
            return Layout(self.shape, 0, own)
        return replace(self, ranges=self.ranges * len(firsts), first_ranges=own)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the local shard of ``rank``."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        if self.first_ranges:
            shape[0] = sum(stop - start for start, stop in self.first_ranges[rank])
        shape[self.dim] = sum(stop - start for start, stop in self.ranges[rank])
        return tuple(shape)

    def first_of(self, rank: int) -> int:
        """Return the first index of dimension 0 on ``rank``, which has a single range of it."""
        if self.first_ranges:
            return self.first_ranges[rank][0][0]
        return self.ranges[rank][0][0] if self.dim == 0 else 0

    def shard_indices(self, rank: int) -> Iterator[tuple[Index, Index]]:
        """Yield, for each range of ``rank``, its index in the full tensor and its index in the local shard.

        With ``first_ranges``, yield them for each pair of ranges. A replicated tensor is one range. An index has a
        slice with both bounds for every dimension.
        """
        everything = tuple(slice(0, size) for size in self.shape)
        if self.dim is None:
            yield everything, everything
            return
        there, here = list(everything), list(everything)
        for rows in _slices(self.first_ranges[rank]) if self.first_ranges else [None]:
            if rows is not None:
                there[0], here[0] = rows
            for places in _slices(self.ranges[rank]):
                there[self.dim], here[self.dim] = places
                yield tuple(there), tuple(here)

    def owned_indices(self, rank: int) -> list[tuple[Index, Index]]:
        """Return the `shard_indices` of ``rank`` that no earlier rank holds.

        Over all ranks, every element appears once.
        """
        if self.dim is None:
            return [*self.shard_indices(rank)] if rank == 0 else []
        earlier = {piece for other in range(rank) for piece in self._pieces(other)}
        pairs = zip(self._pieces(rank), self.shard_indices(rank), strict=True)
        return [place for piece, place in pairs if piece not in earlier]

    def _pieces(self, rank: int) -> list[tuple[Range | None, Range]]:
        """Return the pairs of ranges of `shard_indices`, in the same order."""
        return [*product(self._firsts[rank] or (None,), self.ranges[rank])]

    @property
    def overlaps(self) -> bool:
        """Whether several ranks hold the same elements of a sharded tensor."""
        pieces = [piece for rank in range(len(self.ranges)) for piece in self._pieces(rank)]
        pieces = [(rows, (start, stop)) for rows, (start, stop) in pieces if start < stop]
        return len(set(pieces)) < len(pieces)

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """Slice the local shard of ``rank`` out of the full tensor."""
        parts = [full[index] for index, _ in self.shard_indices(rank)]
        if len(parts) == 1:
            return parts[0]
        columns = len(self.ranges[rank])
        rows = [torch.cat(parts[at : at + columns], self.dim or 0) for at in range(0, len(parts), columns)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def write_shard(self, full: Tensor, local: Tensor, rank: int) -> None:
        """Write the local shard of ``rank`` into ``full``."""
        for full_index, local_index in self.shard_indices(rank):
            full[full_index].copy_(local[local_index])


def _slices(ranges: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """Yield, for each range of a dimension, its slice of the full tensor and its slice of the local shard."""
    offset = 0
    for start, stop in ranges:
        yield slice(start, stop), slice(offset, offset := offset + stop - start)
