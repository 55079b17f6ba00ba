"""How one full tensor divides over the ranks of an axis. Pure functions of shapes; nothing here communicates.

Placing the shards of all ranks into one tensor gives back what was sharded, bit for bit, for every layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[int, int]
"""A half-open interval ``[start, stop)`` of indices."""
Index = tuple[slice, ...]


def even_ranges(count: int, n: int) -> tuple[Range, ...]:
    """Cut ``count`` items into ``n`` runs whose sizes differ by at most one; the longer runs come first."""
    size, extra = divmod(count, n)
    starts = [rank * size + min(rank, extra) for rank in range(n + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


@dataclass(frozen=True)
class EvenSplit:
    """A rule that cuts one dimension: ``count`` indivisible units of ``width`` elements each, shared out evenly."""

    count: int
    width: int = 1

    def limit(self) -> int:
        """The largest number of ranks over which the rule can divide."""
        return self.count

    def extent(self) -> int:
        """The size of the dimension that the rule divides, in elements."""
        return self.count * self.width

    def counts(self, n: int) -> tuple[Range, ...]:
        """The range of units of each of ``n`` ranks. Ranges may overlap (replicated key-value heads)."""
        return even_ranges(self.count, n)

    def ranges(self, n: int) -> tuple[Range, ...]:
        """The range of elements of each of ``n`` ranks."""
        return tuple((start * self.width, stop * self.width) for start, stop in self.counts(n))

    def local_count(self, n: int, rank: int) -> int:
        """How many units ``rank`` holds."""
        start, stop = self.counts(n)[rank]
        return stop - start

    def local_extent(self, n: int, rank: int) -> int:
        """How many elements ``rank`` holds."""
        return self.local_count(n, rank) * self.width


@dataclass(frozen=True)
class GroupedHeads:
    """Attention heads of which every ``query_heads / kv_heads`` share one key-value head (GQA; MQA with one).

    With at least as many key-value heads as ranks, whole groups are shared out. With fewer, each key-value head goes to
    several ranks, which share out the query heads of its group, so that on every rank the ratio of query to key-value
    heads is a whole number, as attention implementations expect.

    Source: Ainslie et al., "GQA: Training Generalized Multi-Query Transformer Models", 2023.
    """

    query_heads: int
    kv_heads: int
    head_dim: int

    @property
    def group(self) -> int:
        return self.query_heads // self.kv_heads

    @property
    def query(self) -> EvenSplit:
        return _Heads(self.query_heads, self.head_dim, groups=self, kv=False)

    @property
    def key_value(self) -> EvenSplit:
        return _Heads(self.kv_heads, self.head_dim, groups=self, kv=True)

    @property
    def interleaved(self) -> tuple[EvenSplit, ...]:
        """The rules of a matrix that holds, group by group, the query heads, then the key and the value head."""
        rules: list[EvenSplit] = []
        for group in range(self.kv_heads):
            query = _Heads(self.group, self.head_dim, groups=self, kv=False, first=group * self.group)
            rules += [query, *[_Heads(1, self.head_dim, groups=self, kv=True, first=group)] * 2]
        return tuple(rules)

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
    """Heads from ``first`` on, of queries or of keys and values; a rank that has none of them has an empty range."""

    groups: GroupedHeads
    kv: bool
    first: int = 0

    def limit(self) -> int:
        return self.groups.query_heads

    def counts(self, n: int) -> tuple[Range, ...]:
        ranges = [pair[self.kv] for pair in self.groups.head_ranges(n)]
        clipped = [(max(start - self.first, 0), min(stop - self.first, self.count)) for start, stop in ranges]
        return tuple((start, stop) if start < stop else (0, 0) for start, stop in clipped)


@dataclass(frozen=True)
class Layout:
    """Where the elements of one full tensor live.

    Attributes:
        shape: the full (global) shape.
        dim: the dimension that is divided, or ``None`` when every rank holds the full tensor.
        ranges: for each rank, the ranges of ``dim`` it holds, in the order in which its local tensor holds them.
            Empty when ``dim`` is ``None``. More than one range per rank where a weight holds several matrices side by
            side (fused query-key-value).
    """

    shape: tuple[int, ...]
    dim: int | None = None
    ranges: tuple[tuple[Range, ...], ...] = ()

    def __post_init__(self) -> None:
        if self.dim is None:
            return
        edge = 0
        for start, stop in sorted(piece for own in self.ranges for piece in own):
            if start <= edge:
                edge = max(edge, stop)
        if edge != self.shape[self.dim]:
            raise ValueError(f"ranges {self.ranges} do not cover dimension {self.dim} of shape {self.shape}")

    @classmethod
    def divided(cls, shape: Sequence[int], dim: int, splits: Sequence[EvenSplit], n: int) -> Layout:
        """Divide ``dim``, which holds the extents of ``splits`` one after the other, over ``n`` ranks."""
        shape = tuple(shape)
        extents = [split.extent() for split in splits]
        if sum(extents) != shape[dim]:
            raise ValueError(f"extents {extents} do not add up to dimension {dim} of shape {shape}")
        per_split = []
        offset = 0
        for split, extent in zip(splits, extents, strict=True):
            per_split.append([(offset + start, offset + stop) for start, stop in split.ranges(n)])
            offset += extent
        own = zip(*per_split, strict=True)
        return cls(shape, dim, tuple(tuple(p for p in pieces if p[0] < p[1]) or pieces[:1] for pieces in own))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        size = sum(stop - start for start, stop in self.ranges[rank])
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def places(self, rank: int) -> Iterator[tuple[Index, Index]]:
        """For each range of ``rank``: where its elements are in the full tensor, and where in the local one.

        A tensor that is not divided is one range. The indices have a slice with both bounds for every dimension.
        """
        whole = tuple(slice(0, size) for size in self.shape)
        if self.dim is None:
            yield whole, whole
            return
        before, after, offset = whole[: self.dim], whole[self.dim + 1 :], 0
        for start, stop in self.ranges[rank]:
            end = offset + stop - start
            yield (*before, slice(start, stop), *after), (*before, slice(offset, end), *after)
            offset = end

    def owned(self, rank: int) -> list[tuple[Index, Index]]:
        """Those `places` of ``rank`` that no earlier rank has too: over all ranks, every element once."""
        if self.dim is None:
            return [*self.places(rank)] if rank == 0 else []
        earlier = {piece for own in self.ranges[:rank] for piece in own}
        pairs = zip(self.ranges[rank], self.places(rank), strict=True)
        return [place for piece, place in pairs if piece not in earlier]

    @property
    def overlaps(self) -> bool:
        """Whether some element of a divided tensor lives on more than one rank."""
        pieces = [piece for own in self.ranges for piece in own]
        return len(set(pieces)) < len(pieces)

    def shard(self, full: Tensor, rank: int) -> Tensor:
        """The local part of ``full``."""
        pieces = [full[there] for there, _ in self.places(rank)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim or 0)

    def place(self, full: Tensor, local: Tensor, rank: int) -> None:
        """Write the part of one rank into ``full``."""
        for there, here in self.places(rank):
            full[there].copy_(local[here])
