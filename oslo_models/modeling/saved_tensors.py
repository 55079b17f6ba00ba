"""Converts this rank's tensors to the names and parts of transformers' saved checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oslo_models.modeling.conversions import (
    Conversions,
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

    def rename(name: str) -> str:
        (saved,) = conversions.revert({name: torch.empty(0)})
        return str(saved)

    shapes = {name: layout.shape for name, layout in layouts.items()}
    stacks, joined = expert_pieces(model, shapes), concatenated_parts(model, shapes)
    chunked = {
        saved: chunks
        for saved, chunks in chunked_names(model, layouts).items()
        if len({layouts[chunk].dim for chunk in chunks}) == 1  # else they stay separate, which transformers also loads
    }
    alternating, merged = interleaved_names(model, layouts), merged_parts(model, shapes)
    padded = padded_names(model, layouts)
    inside = {part for parts in chunked.values() for part in parts}
    places: dict[str, _Place] = {}
    sharded = {}
    for saved, chunks in chunked.items():
        places[saved], sharded[saved] = _Place(chunks[0], others=tuple(chunks[1:])), _together(layouts, chunks)
    for name in tensors:
        if name in inside:
            continue
        if name in joined:
            for index, part in enumerate(joined[name]):
                sharded[part], rows = _of_part(layouts[name], index, len(joined[name]), model.mesh)
                places[part] = _Place(name, rows=rows)
            continue
        if name in alternating:
            saved = alternating[name]
            places[saved], sharded[saved] = _Place(name, alternates=True), _alternating(layouts[name])
            continue
        if name in merged:
            for saved, empty in merged[name][1].items():
                places[saved], sharded[saved] = _Place(name, split=conversions), Layout(tuple(empty.shape))
            continue
        if name in padded:
            rows = model.config.get_text_config().vocab_size
            rank = 0 if model.mesh is None else model.mesh.rank_in(layouts[name])
            sharded[rename(name)], added = _padded(layouts[name], rows, rank)
            places[rename(name)] = _Place(name, added=added)
            continue
        if name not in stacks:
            saved = rename(name)
            places[saved], sharded[saved] = _Place(name), layouts[name]
            continue
        parts = 1 + max(piece.part for piece in stacks[name])
        rank = 0 if model.mesh is None else model.mesh.rank_in(layouts[name])
        first = layouts[name].first_of(rank)
        for piece in stacks[name]:
            sharded[piece.name] = layout = _of_piece(layouts[name], piece.expert, parts)
            shape = layout.local_shape(rank)
            places[piece.name] = _Place(name, piece.expert - first, piece.part, parts, shape)
    return _SavedTensors(tensors, places), sharded, {rename(name): rename(source) for name, source in tied.items()}


@dataclass(frozen=True)
class _Place:
    """Locates a saved tensor in the model's tensors.

    Attributes:
        name: the tensor of the model, or the stack that contains the matrix.
        expert: the expert's index in the local stack. Another rank holds experts with indices outside of the stack.
            ``None`` if the tensor is not stacked.
        part: the index of the matrix among the expert's ``parts`` matrices.
        shape: the local shape, which is empty if another rank holds the expert.
        rows: the rows of the local tensor, if only a part of it is saved under this name.
        others: the tensors that are concatenated after this one.
        alternates: whether the rows of the tensor's two halves are interleaved.
        added: the number of rows of zeros after the local tensor.
        split: the conversions that split the tensor, if it is merged from several.
    """

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1
    shape: tuple[int, ...] = ()
    rows: Range | None = None
    others: tuple[str, ...] = ()
    alternates: bool = False
    added: int = 0
    split: Conversions | None = None


class _SavedTensors(Mapping[str, Tensor]):
    """Maps saved names to a model's tensors. Caches only the latest stack."""

    def __init__(self, tensors: Mapping[str, Tensor], places: Mapping[str, _Place]) -> None:
        self._tensors, self._places = tensors, places
        self._latest: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        place = self._places[name]
        if place.rows is not None:
            return self._tensors[place.name][slice(*place.rows)]
        if place.others:
            return torch.cat([self._tensors[each] for each in (place.name, *place.others)])
        if place.alternates:
            return self._tensors[place.name].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        if place.split is not None:
            return place.split.revert({place.name: self._tensors[place.name]})[name]
        if place.added:
            local = self._tensors[place.name]
            return torch.cat([local, local.new_zeros(place.added, *local.shape[1:])])
        if place.expert is None:
            return self._tensors[place.name]
        if self._latest is None or self._latest[0] != place.name:
            self._latest = place.name, self._tensors[place.name]
        stack = self._latest[1]
        if not 0 <= place.expert < len(stack):
            return stack.new_empty(place.shape)
        rows = stack.shape[1] // place.parts
        return stack[place.expert, place.part * rows : (place.part + 1) * rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


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


def _of_part(whole: Layout, index: int, parts: int, mesh: Any) -> tuple[Layout, Range]:
    """Return the layout and the local rows of one of the ``parts``, which transformers saves in equal sizes."""
    size = -(-whole.shape[0] // parts)
    first, last = index * size, min((index + 1) * size, whole.shape[0])
    shape = (last - first, *whole.shape[1:])
    if whole.dim is None:
        return Layout(shape), (first, last)
    own = [
        tuple((max(a, first) - first, min(b, last) - first) for a, b in ranges if a < last and b > first)
        for ranges in whole.ranges
    ]
    local = whole.ranges[0 if mesh is None else mesh.rank_in(whole)]
    start, stop = (sum(max(min(b, end) - a, 0) for a, b in local) for end in (first, last))
    return Layout(shape, 0, tuple(ranges or ((0, 0),) for ranges in own)), (start, stop)


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
