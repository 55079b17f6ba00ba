"""Properties of layouts: sharding and placing restore every bit, shards are even, heads stay together."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from oslo_models.sharding.layout import EvenSplit, GroupedHeads, Layout, Window, even_ranges
from oslo_models.sharding.shares import shares_of

from support.layouts import distinct, grouped_heads, layouts, rank_counts, units


@given(layouts())
def test_place_inverts_shard(case: tuple[Layout, int]) -> None:
    layout, n = case
    full = distinct(layout.shape)
    shards = [layout.shard(full, rank) for rank in range(n)]
    assert [tuple(shard.shape) for shard in shards] == [layout.local_shape(rank) for rank in range(n)]
    placed = torch.full_like(full, torch.nan)
    for rank in reversed(range(n)):
        layout.write_shard(placed, shards[rank], rank)
    assert torch.equal(placed, full)


@given(layouts())
def test_shard_and_place_keep_every_bit(case: tuple[Layout, int]) -> None:
    """Also bits that arithmetic would lose: NaN payloads, negative zeros, narrow dtypes."""
    layout, n = case
    bits = distinct(layout.shape).to(torch.int16).mul(-977)
    full = bits.view(torch.bfloat16) if bits.dim() else bits
    joined = torch.empty_like(full)
    for rank in range(n):
        layout.write_shard(joined, layout.shard(full, rank), rank)
    assert torch.equal(joined.view(torch.int16) if bits.dim() else joined, bits)


@given(layouts())
def test_each_element_is_owned_by_one_rank(case: tuple[Layout, int]) -> None:
    layout, n = case
    full = distinct(layout.shape)
    held = [layout.shard(full, rank) for rank in range(n)]
    owned = []
    for rank, local in enumerate(held):
        for there, here in layout.owned_indices(rank):
            assert torch.equal(full[there], local[here])
            owned += local[here].flatten().tolist()
    assert sorted(owned) == sorted(full.flatten().tolist())
    if layout.dim is not None:
        assert layout.overlaps == (sum(local.numel() for local in held) > full.numel())


@given(st.integers(0, 200), st.integers(1, 40))
def test_even_ranges_differ_by_at_most_one(count: int, n: int) -> None:
    ranges = even_ranges(count, n)
    sizes = [stop - start for start, stop in ranges]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(count))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(units, st.data())
def test_even_split_differs_by_at_most_one_unit(split: EvenSplit, data: st.DataObject) -> None:
    n = data.draw(st.integers(1, split.max_ranks()))
    sizes = [stop - start for start, stop in split.ranges(n)]
    assert sizes == [split.local_extent(n, rank) for rank in range(n)]
    assert sizes == [split.local_count(n, rank) * split.width for rank in range(n)]
    assert max(sizes) - min(sizes) <= split.width
    assert min(sizes) >= split.width
    assert sum(sizes) == split.extent()


@given(grouped_heads(), st.data())
def test_grouped_heads_keep_query_heads_with_their_key_value_head(heads: GroupedHeads, data: st.DataObject) -> None:
    n = data.draw(rank_counts(heads.query.max_ranks()))
    group = heads.query_heads // heads.kv_heads
    query_of = torch.arange(heads.query_heads).repeat_interleave(heads.head_dim)
    kv_of = torch.arange(heads.kv_heads).repeat_interleave(heads.head_dim)
    held = []
    for rank, (query_range, kv_range) in enumerate(zip(heads.query.ranges(n), heads.key_value.ranges(n), strict=True)):
        query = query_of[slice(*query_range)].unflatten(0, (-1, heads.head_dim))[:, 0].tolist()
        kv = kv_of[slice(*kv_range)].unflatten(0, (-1, heads.head_dim))[:, 0].tolist()
        assert query and kv and len(query) % len(kv) == 0
        ratio = heads.local_ratio(n, rank)
        assert ratio == len(query) // len(kv)
        # attention pairs local query head i with local key-value head i // ratio
        assert [kv[i // ratio] for i in range(len(query))] == [head // group for head in query]
        held += query
    assert held == list(range(heads.query_heads))
    groups = -(-heads.kv_heads // n)  # the most that any rank gets, if shares are equal
    assert shares_of(n) or max(len(range(*r)) for r in heads.query.ranges(n)) <= groups * group * heads.head_dim


@given(grouped_heads(), st.data())
def test_windows_of_a_split_hold_its_elements_in_their_order(heads: GroupedHeads, data: st.DataObject) -> None:
    whole = heads.key_value
    n, cut = data.draw(rank_counts(whole.max_ranks())), data.draw(st.integers(1, whole.extent()))
    first = Window(cut, whole=whole, first=0)
    second = Window(whole.extent() - cut, whole=whole, first=cut)
    for rank, own in enumerate(whole.ranges(n)):
        (a, b), (c, d) = first.ranges(n)[rank], second.ranges(n)[rank]
        assert [*range(a, b), *range(cut + c, cut + d)] == [*range(*own)]
        assert first.local_extent(n, rank) + second.local_extent(n, rank) == whole.local_extent(n, rank)


def test_nine_heads_and_three_key_value_heads_over_two_ranks() -> None:
    heads = GroupedHeads(9, 3, 64)
    assert heads.head_ranges(2) == (((0, 6), (0, 2)), ((6, 9), (2, 3)))
    assert [heads.local_ratio(2, rank) for rank in (0, 1)] == [3, 3]
    assert not Layout.sharded((192, 8), 0, [heads.key_value], 2).overlaps


def test_nine_heads_and_three_key_value_heads_over_four_ranks() -> None:
    heads = GroupedHeads(9, 3, 1)
    assert heads.head_ranges(4) == (((0, 2), (0, 1)), ((2, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3)))
    layout = Layout.sharded((3, 8), 0, [heads.key_value], 4)
    first = [slice(0, 1)]
    assert [[here[0] for _, here in layout.owned_indices(rank)] for rank in range(4)] == [first, [], first, first]
    assert layout.overlaps


def test_twelve_heads_over_five_ranks() -> None:
    assert EvenSplit(12, 64).ranges(5) == ((0, 192), (192, 384), (384, 512), (512, 640), (640, 768))
    assert [EvenSplit(12, 64).local_count(5, rank) for rank in range(5)] == [3, 3, 2, 2, 2]


def test_one_key_value_head_is_on_every_rank() -> None:
    heads = GroupedHeads(8, 1, 4)
    layout = Layout.sharded((4,), 0, [heads.key_value], 3)
    assert [layout.local_shape(rank) for rank in range(3)] == [(4,)] * 3
    assert [[here for _, here in layout.owned_indices(rank)] for rank in range(3)] == [[(slice(0, 4),)], [], []]


def test_fused_query_key_value_is_sharded_by_part() -> None:
    qkv = torch.cat([torch.arange(4) + offset for offset in (0, 100, 200)])
    layout = Layout.sharded((12,), 0, [EvenSplit(2, 2)] * 3, 2)
    assert layout.shard(qkv, 0).tolist() == [0, 1, 100, 101, 200, 201]
    assert layout.shard(qkv, 1).tolist() == [2, 3, 102, 103, 202, 203]


def test_shard_reads_only_its_slices_of_a_lazy_tensor() -> None:
    class Lazy:
        def __init__(self, full: Tensor) -> None:
            self.full, self.read = full, 0

        def __getitem__(self, index: object) -> Tensor:
            piece = self.full[index]  # type: ignore[index]
            self.read += piece.numel()
            return piece

    lazy = Lazy(distinct((5, 12)))
    layout = Layout.sharded((5, 12), 1, [EvenSplit(2, 2)] * 3, 2)
    shard = layout.shard(lazy, 1)
    assert lazy.read == shard.numel() == 30
    assert torch.equal(shard, layout.shard(lazy.full, 1))


def test_invalid_layouts_are_rejected() -> None:
    with pytest.raises(ValueError, match=re.escape("extents [6, 4] do not add up to dimension 1 of shape (3, 12)")):
        Layout.sharded((3, 12), 1, [EvenSplit(3, 2), EvenSplit(4)], 2)
    with pytest.raises(ValueError, match="do not cover dimension 0"):
        Layout((6,), 0, (((0, 2),), ((3, 6),)))
    with pytest.raises(ValueError, match="do not cover dimension 0"):
        Layout((6,), 0, (((0, 2),), ((2, 5),)))
    with pytest.raises(ValueError, match="do not cover dimension 0"):
        Layout((6,), 0, (((0, 2),), ((2, 7),)))
