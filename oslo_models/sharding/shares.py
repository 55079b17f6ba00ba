"""Shares of the ranks of an axis: how devices of different memory divide the heads, features and tokens of a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from typing_extensions import Self

Range = tuple[int, int]
"""A half-open interval ``[start, stop)`` of indices."""
T = TypeVar("T")


class WeightedRanks(int):
    """Number of ranks that hold different shares of each layer. Behaves as the integer everywhere else.

    Layouts take a number of ranks. So every layout that takes this number divides its units by the shares.

    Attributes:
        shares: the share of each rank, without a common factor.
    """

    shares: tuple[int, ...]

    def __new__(cls, shares: Sequence[int]) -> Self:
        ranks = super().__new__(cls, len(shares))
        factor = math.gcd(*shares)
        ranks.shares = tuple(share // factor for share in shares)
        return ranks

    def __reduce__(self) -> Any:
        return WeightedRanks, (self.shares,)


class NestedRanks(int):
    """Number of ranks that divide each layer twice: outer ranks divide the layer, and inner ranks divide each shard.

    Behaves as the integer everywhere else. As in the mesh, the number of a rank is ``inner_rank * outer + outer_rank``.

    Attributes:
        outer: number of outer ranks.
        inner: number of inner ranks.
    """

    outer: int
    inner: int

    def __new__(cls, outer: int, inner: int) -> Self:
        ranks = super().__new__(cls, outer * inner)
        ranks.outer, ranks.inner = outer, inner
        return ranks

    def __reduce__(self) -> Any:
        return NestedRanks, (self.outer, self.inner)

    def in_order(self, parts: Sequence[Sequence[T]]) -> tuple[T, ...]:
        """Return the parts of all ranks from the parts of the inner ranks of each outer rank."""
        return tuple(own[inner] for inner in range(self.inner) for own in parts)


def rank_count(n: int, shares: Sequence[int] | None) -> int:
    """Return the number of ranks, with their shares unless these are equal."""
    return n if not shares or len(set(shares)) == 1 else WeightedRanks(shares)


def shares_of(n: int) -> tuple[int, ...]:
    """Return the shares of ``n`` ranks; empty if they are equal."""
    return n.shares if isinstance(n, WeightedRanks) else ()


def even_ranges(count: int, n: int) -> tuple[Range, ...]:
    """Split ``count`` items into ``n`` ranges. Sizes differ by at most one, and larger ranges come first."""
    size, extra = divmod(count, n)
    starts = [rank * size + min(rank, extra) for rank in range(n + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


def share_ranges(count: int, n: int) -> tuple[Range, ...]:
    """Split ``count`` items into ``n`` ranges by the shares of the ranks, or evenly if the ranks have none.

    Sizes are rounded by largest remainders, and the first of equal remainders is rounded up. Each rank gets an item if
    there are enough of them.
    """
    if isinstance(n, NestedRanks):
        held = share_ranges(count, n.outer)
        parts = [[(first + a, first + b) for a, b in even_ranges(last - first, n.inner)] for first, last in held]
        return n.in_order(parts)
    shares = shares_of(n)
    if not shares:
        return even_ranges(count, n)
    sizes = apportion(count, shares)
    starts = [sum(sizes[:rank]) for rank in range(n + 1)]
    return tuple(zip(starts[:-1], starts[1:], strict=True))


def apportion(count: int, shares: Sequence[int]) -> list[int]:
    """Return the number of items of each share; see `share_ranges`."""
    total = sum(shares)
    sizes = [count * share // total for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda rank: (-(count * shares[rank] % total), rank))
    for rank in by_remainder[: count - sum(sizes)]:
        sizes[rank] += 1
    while count >= len(shares) and 0 in sizes:
        fullest = max(range(len(shares)), key=lambda rank: (sizes[rank] > 1, sizes[rank] / shares[rank]))
        sizes[fullest] -= 1
        sizes[sizes.index(0)] += 1
    return sizes


def share_groups(n: int, groups: int, most: int) -> tuple[Range, ...]:
    """Divide ``n`` consecutive ranks into ``groups`` groups of at most ``most`` ranks, with equal work for each group.

    Without shares, the groups are even. With shares, the rank with the most work for its share has as little as
    possible.
    """
    shares = shares_of(n)
    if not shares:
        return even_ranges(n, groups)
    # best[last]: the load of the fullest rank and the groups, over divisions of the first `last` ranks
    best: dict[int, tuple[float, tuple[Range, ...]]] = {0: (0.0, ())}
    for group in range(groups):
        found: dict[int, tuple[float, tuple[Range, ...]]] = {}
        for first, (load, ranges) in best.items():
            for last in range(first + 1, min(first + most, n - (groups - group - 1)) + 1):
                own = shares[first:last]
                worst = max(load, *(size / share for size, share in zip(apportion(most, own), own, strict=True)))
                if last not in found or worst < found[last][0]:
                    found[last] = worst, (*ranges, (first, last))
        best = found
    return best[n][1]
