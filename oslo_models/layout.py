"""How one full tensor divides over the ranks of an axis. Pure functions of shapes; nothing here communicates.

``unshard([shard(x, r) for r in ranks]) == x`` bitwise, for every layout and every number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Range = tuple[int, int]
"""A half-open interval ``[start, stop)`` of indices."""


def even_ranges(count: int, n: int) -> tuple[Range, ...]:
    """Cut ``count`` items into ``n`` runs whose sizes differ by at most one; the longer runs come first."""
    size, extra = divmod(count, n)
    starts = [rank * size + min(rank, extra) for rank in range(n + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


class Split(Protocol):
    """A rule that cuts one dimension into one range per rank."""

    def limit(self) -> int:
        """The largest number of ranks over which the rule can divide."""

    def extent(self) -> int:
        """The size of the dimension that the rule divides, in elements."""

    def ranges(self, n: int) -> tuple[Range, ...]:
        """The range of elements of each of ``n`` ranks. Ranges may overlap (replicated key-value heads)."""


@dataclass(frozen=True)
class Units:
    """``count`` indivisible units of ``width`` elements each, shared out as evenly as possible."""

    count: int
    width: int = 1

    def limit(self) -> int:
        return self.count

    def extent(self) -> int:
        return self.count * self.width

    def ranges(self, n: int) -> tuple[Range, ...]:
        return tuple((start * self.width, stop * self.width) for start, stop in even_ranges(self.count, n))

    def local_count(self, n: int, rank: int) -> int:
        """How many units ``rank`` holds."""
        start, stop = even_ranges(self.count, n)[rank]
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
    def query(self) -> Split:
        return _Heads(self, kv=False)

    @property
    def key_value(self) -> Split:
        return _Heads(self, kv=True)

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


@dataclass(frozen=True)
class _Heads:
    heads: GroupedHeads
    kv: bool

    def limit(self) -> int:
        return self.heads.query_heads

    def extent(self) -> int:
        return (self.heads.kv_heads if self.kv else self.heads.query_heads) * self.heads.head_dim

    def ranges(self, n: int) -> tuple[Range, ...]:
        width = self.heads.head_dim
        chosen = [pair[self.kv] for pair in self.heads.head_ranges(n)]
        return tuple((start * width, stop * width) for start, stop in chosen)


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
        covered = sorted({piece for pieces in self.ranges for piece in pieces})
        edge = 0
        for start, stop in covered:
            if start > edge:
                break
            edge = max(edge, stop)
        if edge != self.shape[self.dim]:
            raise ValueError(f"ranges {self.ranges} do not cover dimension {self.dim} of shape {self.shape}")

    @classmethod
    def divided(cls, shape: Sequence[int], dim: int, splits: Sequence[Split], n: int) -> Layout:
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
        return cls(shape, dim, tuple(zip(*per_split, strict=True)))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        if self.dim is None:
            return self.shape
        size = sum(stop - start for start, stop in self.ranges[rank])
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def owned(self, rank: int) -> list[Range]:
        """The ranges of the *local* tensor along ``dim`` whose elements no earlier rank holds too.

        Over all ranks, these are every element of the full tensor once. Of a replicated tensor the first rank owns
        all, given as ``[(0, size of the first dimension)]``.
        """
        if self.dim is None:
            return [(0, self.shape[0] if self.shape else 1)] if rank == 0 else []
        earlier = {piece for pieces in self.ranges[:rank] for piece in pieces}
        owned, offset = [], 0
        for start, stop in self.ranges[rank]:
            if (start, stop) not in earlier:
                owned.append((offset, offset + stop - start))
            offset += stop - start
        return owned

    @property
    def overlaps(self) -> bool:
        """Whether some element of a divided tensor lives on more than one rank."""
        pieces = [piece for own in self.ranges for piece in own]
        return len(set(pieces)) < len(pieces)

    def shard(self, full: Any, rank: int) -> Any:
        """The local part of ``full``: any object with tensor indexing, a lazy slice of a file among them."""
        if self.dim is None:
            return full[...]
        prefix = (slice(None),) * self.dim
        pieces = [full[(*prefix, slice(start, stop))] for start, stop in self.ranges[rank]]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """Put the parts of all ranks together again."""
        if self.dim is None:
            return shards[0]
        full = shards[0].new_empty(self.shape)
        for rank, local in enumerate(shards):
            self.place(full, local, rank)
        return full

    def place(self, full: Tensor, local: Tensor, rank: int) -> None:
        """Write the part of one rank into ``full``."""
        if self.dim is None:
            full.copy_(local)
            return
        offset = 0
        for start, stop in self.ranges[rank]:
            full.narrow(self.dim, start, stop - start).copy_(local.narrow(self.dim, offset, stop - start))
            offset += stop - start
