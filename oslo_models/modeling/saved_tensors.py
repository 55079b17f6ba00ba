"""Converts this rank's tensors to the names and parts of transformers' saved checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from oslo_models.modeling.conversions import (
    Conversions,
    alternating_names,
    chunked_names,
    concatenated_parts,
    expert_pieces,
    interleaved_names,
    merged_parts,
    padded_names,
)
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import Layout, Range


def as_saved(
    model: ShardedModel, tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout], tied: Mapping[str, str]
) -> tuple[Mapping[str, Tensor], dict[str, Layout], dict[str, str]]:
    """Convert shards, layouts and tied weights to the names and parts of transformers' saved checkpoints.

    Args:
        model: this rank's part of a model.
        tensors: this rank's shards, by name in the full model. The mapping may read them lazily.
        layouts: the layouts of the tensors.
        tied: maps each tied weight to the name of its source.
    """
    conversions = Conversions.of(model)
    if not conversions:
        return tensors, dict(layouts), dict(tied)

    parts = {saved: (part, layout) for saved, part, layout in _parts(model, conversions, tensors, layouts)}
    sharded = {saved: layout for saved, (_, layout) in parts.items()}
    renamed = {_renamed(conversions, name): _renamed(conversions, source) for name, source in tied.items()}
    return _SavedTensors(tensors, {saved: part for saved, (part, _) in parts.items()}), sharded, renamed


def _renamed(conversions: Conversions, name: str) -> str:
    (saved,) = conversions.revert({name: torch.empty(0)})
    return str(saved)


def _parts(
    model: ShardedModel, conversions: Conversions, names: Iterable[str], layouts: Mapping[str, Layout]
) -> Iterator[tuple[str, _Part, Layout]]:
    """Yield the name, the part and the layout of each saved tensor."""
    shapes = {name: layout.shape for name, layout in layouts.items()}
    stacks, joined = expert_pieces(conversions, shapes), concatenated_parts(conversions, shapes)
    alternating, merged = interleaved_names(conversions, layouts), merged_parts(conversions, shapes)
    padded, inside = padded_names(conversions, layouts), set[str]()
    for saved, chunks in chunked_names(conversions, shapes).items():
        if len({layouts[chunk].dim for chunk in chunks}) == 1:  # else they stay separate, which transformers also loads
            yield saved, _Joined(chunks), _together(layouts, [*chunks])
            inside.update(chunks)
    for saved, (dim, pair) in alternating_names(conversions, shapes).items():
        yield saved, _Dealt(dim, pair), _dealt(layouts[pair[0]], dim)
        inside.update(pair)
    for name in names:
        layout = layouts[name]
        rank = 0 if model.mesh is None else model.mesh.rank_in(layout)
        if name in inside:
            continue
        if name in joined:
            dim, saved_parts = joined[name]
            for index, saved in enumerate(saved_parts):
                of_part, rows = _of_part(layout, dim, index, len(saved_parts), rank)
                yield saved, _Rows(name, dim, rows), of_part
        elif name in alternating:
            yield alternating[name], _Alternating(name), _alternating(layout)
        elif name in merged:
            for saved, empty in merged[name][1].items():
                yield saved, _Split(name, saved, conversions), Layout(tuple(empty.shape))
        elif name in padded:
            full, added = _padded(layout, model.config.get_text_config().vocab_size, rank)
            yield _renamed(conversions, name), _Padded(name, added), full
        elif name in stacks:
            parts, first = 1 + max(piece.part for piece in stacks[name]), layout.first_of(rank)
            for piece in stacks[name]:
                of_piece = _of_piece(layout, piece.expert, parts)
                own = _Matrix(name, piece.expert - first, piece.part, parts, of_piece.local_shape(rank))
                yield piece.name, own, of_piece
        else:
            yield _renamed(conversions, name), _Whole(name), layout


class _Part(Protocol):
    """Computes a saved tensor from this rank's tensors of the model."""

    def of(self, tensors: _LatestTensors) -> Tensor: ...


@dataclass(frozen=True)
class _Whole:
    name: str

    def of(self, tensors: _LatestTensors) -> Tensor:
        return tensors[self.name]


@dataclass(frozen=True)
class _Rows:
    """Rows of the local tensor, along a dimension."""

    name: str
    dim: int
    rows: Range

    def of(self, tensors: _LatestTensors) -> Tensor:
        start, stop = self.rows
        return tensors[self.name].narrow(self.dim, start, stop - start)


@dataclass(frozen=True)
class _Joined:
    """Concatenation of several tensors.

    Attributes:
        halves: by the name of each tensor, half of the rows of a head if they are saved in rotary pairs, else 0.
    """

    halves: Mapping[str, int]

    def of(self, tensors: _LatestTensors) -> Tensor:
        return torch.cat([_in_pairs(tensors[name], half) for name, half in self.halves.items()])


def _in_pairs(x: Tensor, half: int) -> Tensor:
    """Return rows of whole heads with the rows of each rotary pair side by side."""
    return x.unflatten(0, (-1, 2, half)).transpose(1, 2).flatten(0, 2) if half else x


@dataclass(frozen=True)
class _Dealt:
    """Tensor with alternating rows of two tensors, along a dimension."""

    dim: int
    pair: Sequence[str]

    def of(self, tensors: _LatestTensors) -> Tensor:
        return torch.stack([tensors[name] for name in self.pair], self.dim + 1).flatten(self.dim, self.dim + 1)


@dataclass(frozen=True)
class _Alternating:
    """Tensor with alternating rows of its two halves."""

    name: str

    def of(self, tensors: _LatestTensors) -> Tensor:
        return tensors[self.name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


@dataclass(frozen=True)
class _Split:
    """One of the tensors from which transformers merges a tensor."""

    name: str
    saved: str
    conversions: Conversions

    def of(self, tensors: _LatestTensors) -> Tensor:
        return self.conversions.revert({self.name: tensors[self.name]})[self.saved]


@dataclass(frozen=True)
class _Padded:
    """Tensor with ``added`` rows of zeros at its end."""

    name: str
    added: int

    def of(self, tensors: _LatestTensors) -> Tensor:
        local = tensors[self.name]
        return torch.cat([local, local.new_zeros(self.added, *local.shape[1:])]) if self.added else local


@dataclass(frozen=True)
class _Matrix:
    """Matrix of an expert in a stack.

    Attributes:
        name: the stack.
        expert: the expert's index in the local stack. Another rank holds experts with indices outside of the stack.
        part: the index of the matrix among the expert's ``parts`` matrices.
        shape: the local shape, which is empty if another rank holds the expert.
    """

    name: str
    expert: int
    part: int
    parts: int
    shape: tuple[int, ...]

    def of(self, tensors: _LatestTensors) -> Tensor:
        stack = tensors.stack(self.name)
        if not 0 <= self.expert < len(stack):
            return stack.new_empty(self.shape)
        rows = stack.shape[1] // self.parts
        return stack[self.expert, self.part * rows : (self.part + 1) * rows]


class _LatestTensors:
    """Tensors of the model, which may be read lazily. Keeps the latest stack, which many saved tensors are parts of."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._latest: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def stack(self, name: str) -> Tensor:
        if self._latest is None or self._latest[0] != name:
            self._latest = name, self._tensors[name]
        return self._latest[1]


class _SavedTensors(Mapping[str, Tensor]):
    """Maps saved names to tensors."""

    def __init__(self, tensors: Mapping[str, Tensor], parts: Mapping[str, _Part]) -> None:
        self._tensors, self._parts = _LatestTensors(tensors), parts

    def __getitem__(self, name: str) -> Tensor:
        return self._parts[name].of(self._tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def _of_piece(stack: Layout, expert: int, parts: int) -> Layout:
    """Return the layout of one expert's matrix in a stack."""
    _, rows, columns = stack.shape
    shape = (rows // parts, columns)
    if stack.dim is None:
        return Layout(shape)
    if stack.dim == 0:  # one rank holds the full matrix
        owners = [start <= expert < stop for ((start, stop),) in stack.ranges]
        return Layout(shape, 0, tuple(((0, shape[0] if owner else 0),) for owner in owners))
    # all parts are sharded like the first part, and its ranges come first on each rank
    of_part = [ranges if stack.dim == 2 else ranges[: len(ranges) // parts] for ranges in stack.ranges]
    owners = [start <= expert < stop for ((start, stop),) in stack.first_ranges] or [True] * len(of_part)
    own = tuple(ranges if owner else ((0, 0),) for ranges, owner in zip(of_part, owners, strict=True))
    return Layout(shape, stack.dim - 1, own)


def _of_part(whole: Layout, dim: int, index: int, parts: int, rank: int) -> tuple[Layout, Range]:
    """Return the layout and the local rows of one of the ``parts``, which transformers saves in equal sizes.

    Args:
        dim: the dimension along which the parts are concatenated.
    """
    rows = whole.shape[dim]
    size = -(-rows // parts)
    first, last = index * size, min((index + 1) * size, rows)
    shape = (*whole.shape[:dim], last - first, *whole.shape[dim + 1 :])
    if whole.dim != dim:
        return replace(whole, shape=shape), (first, last)
    own = [
        tuple((max(a, first) - first, min(b, last) - first) for a, b in ranges if a < last and b > first)
        for ranges in whole.ranges
    ]
    local = whole.ranges[rank]
    start, stop = (sum(max(min(b, end) - a, 0) for a, b in local) for end in (first, last))
    return replace(whole, shape=shape, ranges=tuple(ranges or ((0, 0),) for ranges in own)), (start, stop)


def _dealt(part: Layout, dim: int) -> Layout:
    """Return the layout of a tensor with alternating rows of two tensors that have the same layout."""
    shape = (*part.shape[:dim], 2 * part.shape[dim], *part.shape[dim + 1 :])
    if part.dim != dim:
        return replace(part, shape=shape)
    return replace(part, shape=shape, ranges=tuple(tuple((2 * a, 2 * b) for a, b in own) for own in part.ranges))


def _alternating(whole: Layout) -> Layout:
    """Return the layout of stacked experts after interleaving two projections. A rank keeps the same rows of each."""
    if whole.dim != 1:
        return whole
    return replace(whole, ranges=tuple(((2 * start, 2 * stop),) for (start, stop), *_ in whole.ranges))


def _padded(head: Layout, rows: int, rank: int) -> tuple[Layout, int]:
    """Return the layout of a padded LM head, and the number of rows to add locally: the last rank adds all of them."""
    old, shape = head.shape[0], (rows, *head.shape[1:])
    if head.dim != 0:
        return replace(head, shape=shape), rows - old
    own = tuple(tuple((a, rows if b == old else b) for a, b in ranges) for ranges in head.ranges)
    return replace(head, shape=shape, ranges=own), (rows - old) * any(stop == old for _, stop in head.ranges[rank])


def _together(layouts: Mapping[str, Layout], names: Sequence[str]) -> Layout:
    """Return the layout of tensors that are concatenated along their first dimension, both in full and on each rank."""
    parts = [layouts[name] for name in names]
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    if parts[0].dim != 0:
        return replace(parts[0], shape=shape)
    firsts = [sum(part.shape[0] for part in parts[:index]) for index in range(len(parts))]
    own = [
        tuple((a + first, b + first) for first, part in zip(firsts, parts, strict=True) for a, b in part.ranges[rank])
        for rank in range(len(parts[0].ranges))
    ]
    return Layout(shape, 0, tuple(own))
