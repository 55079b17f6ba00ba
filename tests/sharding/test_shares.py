"""Shares of ranks: sizes follow the ratio, and every rank gets something where there is enough."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oslo_models.sharding.layout import EvenSplit, ExpertWidth, GroupedHeads
from oslo_models.sharding.shares import (
    NestedRanks,
    WeightedRanks,
    apportion,
    even_ranges,
    rank_count,
    share_groups,
    share_ranges,
    shares_of,
)

shares = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(st.integers(0, 300), shares)
def test_sizes_follow_the_shares(count: int, given: list[int]) -> None:
    sizes = apportion(count, given)
    assert sum(sizes) == count
    assert min(sizes) >= (1 if count >= len(given) else 0)
    if count >= sum(given):  # then no rank is lifted from zero
        assert all(abs(size - count * share / sum(given)) < 1 for size, share in zip(sizes, given, strict=True))


@given(st.integers(0, 300), st.integers(1, 9), st.integers(1, 8))
def test_equal_shares_are_even(count: int, share: int, n: int) -> None:
    assert rank_count(n, [share] * n) == n
    assert shares_of(rank_count(n, [share] * n)) == ()
    starts = [0]
    for size in apportion(count, [share] * n):
        starts.append(starts[-1] + size)
    assert tuple(zip(starts, starts[1:], strict=False)) == even_ranges(count, n)


def test_a_number_with_shares_is_an_integer_everywhere_else() -> None:
    n = rank_count(3, [4, 2, 2])
    assert isinstance(n, WeightedRanks)
    assert (n, hash(n), str(n), f"{n}", n // 3, [1] * n) == (3, hash(3), "3", "3", 1, [1, 1, 1])
    assert shares_of(n) == (2, 1, 1)
    assert shares_of(pickle.loads(pickle.dumps(n))) == shares_of(copy.deepcopy(n)) == (2, 1, 1)


def test_units_of_each_kind_of_layer() -> None:
    n = rank_count(3, [2, 1, 1])
    assert EvenSplit(12, 64).ranges(n) == ((0, 384), (384, 576), (576, 768))
    assert EvenSplit(97).ranges(n) == ((0, 49), (49, 73), (73, 97))
    assert GroupedHeads(8, 4, 1).head_ranges(n) == (((0, 4), (0, 2)), ((4, 6), (2, 3)), ((6, 8), (3, 4)))
    assert ExpertWidth(8, expert=1, experts=2).ranges(n) == ((0, 4), (4, 6), (6, 8))


def test_ranks_that_replicate_a_key_value_head_have_equal_loads() -> None:
    """Two key-value heads over three ranks: the large rank has a group alone."""
    heads = GroupedHeads(8, 2, 1)
    large_first, large_last = (heads.head_ranges(rank_count(3, given)) for given in ([2, 1, 1], [1, 1, 2]))
    assert large_first == (((0, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2)))
    assert large_last == (((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 8), (1, 2)))


def test_ranks_divide_the_units_of_ranks() -> None:
    """Three and two of five units, over two ranks each. The outer rank changes fastest."""
    n = NestedRanks(2, 2)
    assert (n, hash(n), [1] * n) == (4, hash(4), [1, 1, 1, 1])
    assert EvenSplit(5, 10).ranges(n) == ((0, 20), (30, 40), (20, 30), (40, 50))
    assert EvenSplit(8).ranges(NestedRanks(2, 3))[::2] == ((0, 2), (2, 3), (3, 4))
    again = pickle.loads(pickle.dumps(n))
    assert EvenSplit(5, 10).ranges(again) == EvenSplit(5, 10).ranges(copy.deepcopy(n)) == EvenSplit(5, 10).ranges(n)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_heads_that_ranks_divide_twice_keep_their_key_value_head(
    outer: int, inner: int, groups: int, group: int
) -> None:
    """Each query head is on one rank, together with its key-value head, as far as there are enough heads."""
    heads, n = GroupedHeads(groups * group, groups, 1), NestedRanks(outer, inner)
    if outer > heads.query_heads:
        return
    held = []
    for (q, q_stop), (kv, kv_stop) in heads.head_ranges(n):
        held += range(q, q_stop)
        assert (q_stop - q) % (kv_stop - kv) == 0
        assert all(kv <= head // group < kv_stop for head in range(q, q_stop))
    assert sorted(held) == [*range(heads.query_heads)]


@given(st.data())
def test_groups_of_ranks_are_as_even_as_possible(data: st.DataObject) -> None:
    """Compared with every division."""
    groups, most = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    given = data.draw(st.lists(st.integers(1, 5), min_size=groups, max_size=groups * most))
    n = rank_count(len(given), given)

    def load(ranges: tuple[tuple[int, int], ...]) -> float:
        return max(
            (stop - start) / given[first + rank]
            for first, last in ranges
            for rank, (start, stop) in enumerate(share_ranges(most, rank_count(last - first, given[first:last])))
        )

    def divisions(first: int, left: int) -> list[tuple[tuple[int, int], ...]]:
        if not left:
            return [()] if first == n else []
        ends = range(first + 1, min(first + most, n) + 1)
        return [((first, end), *rest) for end in ends for rest in divisions(end, left - 1)]

    found = share_groups(n, groups, most)
    assert found in divisions(0, groups)
    if shares_of(n):
        assert load(found) == pytest.approx(min(map(load, divisions(0, groups))))
