"""How one tensor is sharded over the ranks of an axis. Pure functions of shapes, without communication.

For every layout, writing the shards of all ranks into one tensor restores the full tensor bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

Range = tuple[int, int]
"""A half-open interval ``[start, stop)`` of indices."""
Index = tuple[slice, ...]


def even_ranges(count: int, n: int) -> tuple[Range, ...]:
    """Split ``count`` items into ``n`` ranges whose sizes differ by at most one; the larger ranges come first."""
    size, extra = divmod(count, n)
    starts = [rank * size + min(rank, extra) for rank in range(n + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


@dataclass(frozen=True)
class EvenSplit:
    """Splits a dimension that consists of ``count`` indivisible units of ``width`` elements, as evenly as possible."""

    count: int
    width: int = 1

    def max_ranks(self) -> int:
        """The largest number of ranks that the dimension can be split over."""
        return self.count

    def extent(self) -> int:
        """The full size of the dimension, in elements."""
        return self.count * self.width

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        """The range of units of each of ``n`` ranks. Ranges overlap where key-value heads are replicated."""
        return even_ranges(self.count, n)

    def ranges(self, n: int) -> tuple[Range, ...]:
        """The range of elements of each of ``n`` ranks."""
        return tuple((start * self.width, stop * self.width) for start, stop in self.unit_ranges(n))

    def local_count(self, n: int, rank: int) -> int:
        """The number of units on ``rank``."""
        start, stop = self.unit_ranges(n)[rank]
        return stop - start

    def local_extent(self, n: int, rank: int) -> int:
        """The number of elements on ``rank``."""
        return self.local_count(n, rank) * self.width

    def over_experts(self, groups: int) -> EvenSplit:
        """The split where experts are divided over so many groups of ranks: the same, but for those of experts."""
        return self


@dataclass(frozen=True)
class ExpertWidth(EvenSplit):
    """Splits the width of one of several experts, which may be divided over groups of consecutive ranks.

    The ranks of a group share the width of its experts; the other ranks hold nothing of them.

    Attributes:
        expert: the number of the expert.
        experts: how many there are.
        groups: over how many groups of ranks they are divided.
    """

    expert: int = 0
    experts: int = 1
    groups: int = 1

    def max_ranks(self) -> int:
        return self.count * self.groups

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        check_groups(self.groups, self.experts, n)
        share = n // self.groups
        own = even_ranges(self.count, share)
        held = [start <= self.expert < stop for start, stop in even_ranges(self.experts, self.groups)]
        return tuple(own[rank % share] if held[rank // share] else (0, 0) for rank in range(n))

    def over_experts(self, groups: int) -> EvenSplit:
        return replace(self, groups=groups)


def check_groups(groups: int, experts: int, n: int) -> None:
    """Raise ``ValueError`` if so many experts cannot be divided over so many groups of ``n`` ranks."""
    if groups > experts:
        raise ValueError(f"expert_parallel_size={groups} is more than {experts}, the number of experts")
    if groups > n:
        raise ValueError(
            f"expert_parallel_size={groups} divides experts over the ranks of several replicas, and no token is sent "
            f"to other replicas by layers of this kind: use at most tensor_parallel_size={n}"
        )


@dataclass(frozen=True)
class GroupedHeads:
    """Splits the heads of grouped-query attention, where ``query_heads / kv_heads`` query heads share a key-value head.

    With at least as many key-value heads as ranks, each rank gets complete groups. With fewer, each key-value head is
    replicated on several ranks, which split the query heads of its group among them. So the ratio of query to
    key-value heads is an integer on every rank, as attention implementations expect.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023.
    """

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        """The number of query heads that share one key-value head."""
        return self.query_heads // self.kv_heads

    @property
    def query(self) -> EvenSplit:
        """The split of a query projection."""
        return _Heads(self.query_heads, self.head_dim, groups=self, kv=False)

    @property
    def key_value(self) -> EvenSplit:
        """The split of a key or a value projection."""
        return _Heads(self.kv_heads, self.head_dim, groups=self, kv=True)

    @property
    def interleaved(self) -> tuple[EvenSplit, ...]:
        """The splits of a fused matrix that holds for each group its query heads, then its key and its value head."""
        splits: list[EvenSplit] = []
        for group in range(self.kv_heads):
            query = _Heads(self.group, self.head_dim, groups=self, kv=False, first=group * self.group)
            splits += [query, *[_Heads(1, self.head_dim, groups=self, kv=True, first=group)] * 2]
        return tuple(splits)

    def head_ranges(self, n: int) -> tuple[tuple[Range, Range], ...]:
        """For each rank the range of its query heads and the range of its key-value heads."""
        if n <= self.kv_heads:
            kv = even_ranges(self.kv_heads, n)
            return tuple(((a * self.group, b * self.group), (a, b)) for a, b in kv)
        pairs = []
        for kv_head, (first, last) in enumerate(even_ranges(n, self.kv_heads)):
            for a, b in even_ranges(self.group, last - first):
                pairs.append(((kv_head * self.group + a, kv_head * self.group + b), (kv_head, kv_head + 1)))
        return tuple(pairs)

    def local_ratio(self, n: int, rank: int) -> int:
        """Query heads per key-value head on ``rank`` (``num_key_value_groups`` of an attention module)."""
        (q_start, q_stop), (kv_start, kv_stop) = self.head_ranges(n)[rank]
        return (q_stop - q_start) // (kv_stop - kv_start)


@dataclass(frozen=True, kw_only=True)
class _Heads(EvenSplit):
    """Query heads, or key-value heads, from number ``first`` on; empty on ranks that hold none of them."""

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
    """The split of a dimension that is a part of one split elsewhere: a rank has those elements of its own in it.

    Attributes:
        whole: the split of the larger dimension.
        first: the first element of the part, which has ``count`` elements.
    """

    whole: EvenSplit
    first: int

    def max_ranks(self) -> int:
        return self.whole.max_ranks()

    def unit_ranges(self, n: int) -> tuple[Range, ...]:
        ranges = self.whole.ranges(n)
        return _clipped([(start - self.first, stop - self.first) for start, stop in ranges], self.count)


def _clipped(ranges: Sequence[Range], count: int) -> tuple[Range, ...]:
    """What each range has of the first ``count`` indices."""
    clipped = [(max(start, 0), min(stop, count)) for start, stop in ranges]
    return tuple((start, stop) if start < stop else (0, 0) for start, stop in clipped)


@dataclass(frozen=True)
class Layout:
    """Which elements of a full tensor each rank holds.

    Attributes:
        shape: the full (global) shape.
        dim: the sharded dimension, or ``None`` if the tensor is replicated.
        ranges: for each rank, the ranges of ``dim`` that it holds, in the order of its local tensor. Empty if ``dim``
            is ``None``. A rank has several ranges where a weight concatenates several matrices (fused query-key-value).
        first_ranges: for each rank, the ranges of dimension 0 that it holds, where that is sharded beside ``dim``:
            experts over groups of ranks, and the width of each over the ranks of a group.
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
            splits: the splits of the matrices that are concatenated along ``dim``.

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
        """The layout over groups of ``share`` ranks, which shard a range of dimension 0 each as this layout shards all.

        Args:
            firsts: the range of each group.
            share: over how many ranks this layout is.
        """
        own = tuple((first,) for first in firsts for _ in range(share))
        if share == 1 or self.dim is None:
            return Layout(self.shape, 0, own)
        return replace(self, ranges=self.ranges * len(firsts), first_ranges=own)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the local tensor of ``rank``."""
        if self.dim is None:
            return self.shape
        shape = list(self.shape)
        if self.first_ranges:
            shape[0] = sum(stop - start for start, stop in self.first_ranges[rank])
        shape[self.dim] = sum(stop - start for start, stop in self.ranges[rank])
        return tuple(shape)

    def first_of(self, rank: int) -> int:
        """The first index of dimension 0 that ``rank`` holds, of one range."""
        if self.first_ranges:
            return self.first_ranges[rank][0][0]
        return self.ranges[rank][0][0] if self.dim == 0 else 0

    def shard_indices(self, rank: int) -> Iterator[tuple[Index, Index]]:
        """For each range of ``rank``, its index in the full tensor and its index in the local tensor.

        With ``first_ranges``, for each pair of ranges. A replicated tensor is one range. An index has a slice with both
        bounds for every dimension.
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
        """Those `places` of ``rank`` that no earlier rank holds: over all ranks, every element appears once."""
        if self.dim is None:
            return [*self.shard_indices(rank)] if rank == 0 else []
        earlier = {piece for other in range(rank) for piece in self._pieces(other)}
        pairs = zip(self._pieces(rank), self.shard_indices(rank), strict=True)
        return [place for piece, place in pairs if piece not in earlier]

    def _pieces(self, rank: int) -> list[tuple[Range | None, Range]]:
        """The pairs of ranges of `shard_indices`, in the same order."""
        return [*product(self._firsts[rank] or (None,), self.ranges[rank])]

    @property
    def overlaps(self) -> bool:
        """Whether several ranks hold the same elements of a sharded tensor."""
        pieces = [piece for rank in range(len(self.ranges)) for piece in self._pieces(rank)]
        pieces = [(rows, (start, stop)) for rows, (start, stop) in pieces if start < stop]
        return len(set(pieces)) < len(pieces)

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """The shard of ``rank``, cut out of the full tensor."""
        parts = [full[index] for index, _ in self.shard_indices(rank)]
        if len(parts) == 1:
            return parts[0]
        columns = len(self.ranges[rank])
        rows = [torch.cat(parts[at : at + columns], self.dim or 0) for at in range(0, len(parts), columns)]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def write_shard(self, full: Tensor, local: Tensor, rank: int) -> None:
        """Write the shard ``local`` of ``rank`` into ``full``."""
        for full_index, local_index in self.shard_indices(rank):
            full[full_index].copy_(local[local_index])


def _slices(ranges: Sequence[Range]) -> Iterator[tuple[slice, slice]]:
    """For each of a rank's ranges of a dimension, its slice of the full tensor and its slice of the local tensor."""
    offset = 0
    for start, stop in ranges:
        yield slice(start, stop), slice(offset, offset := offset + stop - start)
