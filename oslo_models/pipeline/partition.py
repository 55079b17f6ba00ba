"""Which blocks are on which pipeline stage. Pure functions of costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

from oslo_models.sharding.layout import Range


def partition(costs: Sequence[float], stages: int, before: float = 0.0, after: float = 0.0) -> tuple[Range, ...]:
    """Cut a row of blocks into ``stages`` runs, each at least one block long, so that the costliest is cheapest.

    Among the cuts that reach that, the one with the most even stages.

    Args:
        costs: the cost of each block.
        before: what the first stage does besides (embeddings).
        after: what the last stage does besides (the head, whose vocabulary counts).

    Raises:
        ValueError: there are more stages than blocks.
    """
    n = len(costs)
    if stages > n:
        raise ValueError(f"{stages} stages cannot share {n} blocks")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def weight(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (before if start == 0 else 0.0) + (after if stop == n else 0.0)

    def cheapest(bound: float) -> tuple[float, tuple[int, ...]]:
        """The least sum of squared weights, none of them above ``bound``, and where the stages end."""

        @cache
        def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
            if left == 1:
                last = weight(start, n)
                return (last**2, (n,)) if last <= bound else (float("inf"), ())
            options: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())]
            for stop in range(start + 1, n - left + 2):
                own = weight(start, stop)
                if own <= bound:
                    rest, ends = best(stop, left - 1)
                    options.append((own**2 + rest, (stop, *ends)))
            return min(options, key=lambda option: option[0])

        return best(0, stages)

    bounds = sorted({weight(start, stop) for start in range(n) for stop in range(start + 1, n + 1)})
    feasible = bisect_left(bounds, True, key=lambda bound: cheapest(bound)[0] < float("inf"))
    _, ends = cheapest(bounds[feasible])
    return tuple(zip((0, *ends[:-1]), ends, strict=True))
