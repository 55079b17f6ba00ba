"""Hypothesis strategies for layouts, and tensors by which a test sees where each element went."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from oslo_models.sharding.layout import EvenSplit, GroupedHeads, Layout
from oslo_models.sharding.shares import rank_count

units = st.builds(EvenSplit, st.integers(1, 12), st.integers(1, 4))


@st.composite
def rank_counts(draw: st.DrawFn, most: int) -> int:
    """A number of ranks, with equal or drawn shares."""
    n = draw(st.integers(1, most))
    return rank_count(n, draw(st.none() | st.lists(st.integers(1, 5), min_size=n, max_size=n)))


@st.composite
def grouped_heads(draw: st.DrawFn) -> GroupedHeads:
    kv_heads = draw(st.integers(1, 6))
    return GroupedHeads(kv_heads * draw(st.integers(1, 6)), kv_heads, draw(st.integers(1, 3)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    """A layout and the number of ranks it is for."""
    if draw(st.integers(0, 7)) == 0:
        return Layout(tuple(draw(st.lists(st.integers(1, 4), max_size=3)))), draw(st.integers(1, 5))
    if draw(st.integers(0, 3)) == 0:
        return draw(layouts_of_two_dimensions())
    heads = grouped_heads()
    kinds = (units, heads.map(lambda h: h.query), heads.map(lambda h: h.key_value))
    fused = heads.map(lambda h: [h.query, h.key_value, h.key_value])
    splits: list[EvenSplit] = draw(st.one_of(st.lists(st.one_of(*kinds), min_size=1, max_size=3), fused))
    n = draw(rank_counts(min(split.max_ranks() for split in splits)))
    others = draw(st.lists(st.integers(1, 3), max_size=2))
    dim = draw(st.integers(0, len(others)))
    shape = (*others[:dim], sum(split.extent() for split in splits), *others[dim:])
    return Layout.sharded(shape, dim, splits, n), n


@st.composite
def layouts_of_two_dimensions(draw: st.DrawFn) -> tuple[Layout, int]:
    """Split dimension 0 over groups of ranks, and dimension 1 over the ranks of a group; both have several matrices."""
    splits = [draw(st.lists(units, min_size=1, max_size=3)) for _ in range(2)]
    groups, share = (draw(st.integers(1, min(split.max_ranks() for split in each))) for each in splits)
    shape = tuple(sum(split.extent() for split in each) for each in splits)
    rows = Layout.sharded(shape, 0, splits[0], groups).ranges
    columns = Layout.sharded(shape, 1, splits[1], share).ranges
    first = tuple(own for own in rows for _ in range(share))
    return Layout(shape, 1, columns * groups, first), groups * share


def distinct(shape: tuple[int, ...]) -> Tensor:
    """A tensor in which no two elements are equal."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
