"""Partitions the blocks of a model into pipeline stages. Pure functions of costs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache

from oslo_models.sharding.layout import Range


def partition(costs: Sequence[float], stages: int, before: float = 0.0, after: float = 0.0) -> tuple[Range, ...]:
    """Split a sequence of blocks into contiguous stages so that the highest cost of a stage is minimal.

    Each stage gets at least one block. The least sum of squared costs decides among partitions with minimal highest
    cost.

    Args:
        costs: cost of each block.
        stages: number of stages.
        before: additional cost of the first stage (embeddings).
        after: additional cost of the last stage (the head).

    Raises:
        ValueError: there are more stages than blocks.
    """
    n = len(costs)
    if stages > n:
        raise ValueError(f"{stages} stages cannot share {n} blocks")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)

    def stage_cost(start: int, stop: int) -> float:
        return sums[stop] - sums[start] + (before if start == 0 else 0.0) + (after if stop == n else 0.0)

    def most_even(bound: float) -> tuple[float, tuple[int, ...]]:
        """Return the least sum of squared costs with no stage above ``bound``, and the ends of the stages."""

        @cache
        def best(start: int, left: int) -> tuple[float, tuple[int, ...]]:
            if left == 1:
                last = stage_cost(start, n)
                return (last**2, (n,)) if last <= bound else (float("inf"), ())
            options: list[tuple[float, tuple[int, ...]]] = [(float("inf"), ())]
            for stop in range(start + 1, n - left + 2):
                cost = stage_cost(start, stop)
                if cost <= bound:
                    rest, ends = best(stop, left - 1)
                    options.append((cost**2 + rest, (stop, *ends)))
            return min(options, key=lambda option: option[0])

        return best(0, stages)

    bounds = sorted({stage_cost(start, stop) for start in range(n) for stop in range(start + 1, n + 1)})
    feasible = bisect_left(bounds, True, key=lambda bound: most_even(bound)[0] < float("inf"))
    _, ends = most_even(bounds[feasible])
    return tuple(zip((0, *ends[:-1]), ends, strict=True))
