"""Converts between checkpoint and model layouts: stacked, joined, chunked, interleaved, merged and padded weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    revert_weight_conversion,
)

from oslo_models.checkpoint import CheckpointError, CheckpointReader
from oslo_models.checkpoint.chunked import chunked_reader
from oslo_models.checkpoint.concatenated import concatenated_reader
from oslo_models.checkpoint.interleaved import interleaved_reader
from oslo_models.checkpoint.merged import Merge, merged_reader
from oslo_models.checkpoint.stacked import Piece, stacked_reader
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.sharding.layout import Layout, Range


def expert_pieces(model: ShardedModel, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[Piece]]:
    """Return the checkpoint's matrices of each stack of experts, by the name of the stack. Other models have none.

    The names come from transformers' own reverse conversion of a small stack with numbered elements.

    Args:
        model: the model, or a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    stacks = {}
    conversions = _conversions(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    for name, shape in shapes.items():
        converter = next((entry for entry in converters if _stacks(entry, name)), None)
        if converter is not None:
            parts = len(converter.source_patterns)
            marks = torch.arange(shape[0] * parts).view(-1, parts, 1)
            named = revert_weight_conversion(_Conversions(conversions, model.config), {name: marks})
            stacks[name] = [Piece(piece, *divmod(int(mark), parts)) for piece, mark in named.items()]
    return stacks


@dataclass(frozen=True)
class _Conversions:
    """The model attributes that transformers reads to convert tensor names for saving."""

    _weight_conversions: Sequence[Any]
    config: Any


def _conversions(model: ShardedModel) -> list[Any]:
    """Return transformers' checkpoint conversions of a model, without conversions for old checkpoints only."""
    conversions = get_model_conversion_mapping(model, add_legacy=False)
    return [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]


def concatenated_parts(model: ShardedModel, shapes: Mapping[str, Sequence[int]]) -> dict[str, list[str]]:
    """Map each tensor that transformers concatenates from checkpoint tensors to the names of these parts.

    Args:
        model: the model, or a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    conversions = _conversions(model)
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter) and _concatenates(entry)]
    found = {}
    for name, shape in shapes.items():
        converter = next((entry for entry in converters if name.endswith(entry.target_patterns[0])), None)
        if converter is not None:
            parts = _number_of_parts(converter, model.config, shape[0])
            marks = torch.arange(parts).view(-1, 1)
            named = revert_weight_conversion(_Conversions(conversions, model.config), {name: marks})
            found[name] = sorted(named, key=lambda part: int(named[part]))
    return found


def _number_of_parts(converter: WeightConverter, config: Any, rows: int) -> int:
    """Return the number of checkpoint parts of a tensor with this number of rows."""
    attribute = converter.operations[0].num_shards_attribute
    if attribute is None:
        return len(converter.source_patterns)
    size = -(-rows // getattr(config.get_text_config(), attribute))
    return -(-rows // size)  # parts of equal size, and a smaller last part


def _concatenates(converter: WeightConverter) -> bool:
    """Whether a conversion concatenates tensors along their first dimension."""
    operations, targets = converter.operations, converter.target_patterns
    known = [type(operation) for operation in operations] == [Concatenate] and len(targets) == 1
    return known and operations[0].dim == 0


def chunked_names(model: ShardedModel, names: Iterable[str]) -> dict[str, list[str]]:
    """Map each checkpoint tensor that transformers splits into several to the model's names of these parts.

    Args:
        model: the model, or a stage of it.
        names: the names of tensors in the full model.
    """
    conversions, found = _conversions(model), {}
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter) and _chunks(entry)]
    names = set(names) if converters else set()
    for name in sorted(names):
        for converter in converters:
            first, *others = converter.target_patterns
            parts = [name, *(name.replace(first, other) for other in others)]
            if first in name and names.issuperset(parts):
                marks = {part: torch.arange(1) for part in parts}
                (saved,) = revert_weight_conversion(_Conversions(conversions, model.config), marks)
                found[str(saved)] = parts
    return found


def _chunks(converter: WeightConverter) -> bool:
    """Whether a conversion splits a tensor along its first dimension.

    ``Chunk`` makes parts of equal size. ``Split``, since transformers 5.24, makes parts of the sizes in the model.
    """
    operations = [type(operation).__name__ for operation in converter.operations]
    known = operations in (["Chunk"], ["Split"]) and len(converter.target_patterns) > 1
    return known and converter.operations[0].dim == 0 and len(converter.source_patterns) == 1


def interleaved_names(model: ShardedModel, names: Iterable[str]) -> dict[str, str]:
    """Map the model's names of stacked experts with interleaved rows in checkpoints to the checkpoint names.

    Args:
        model: the model, or a stage of it.
        names: the names of tensors in the full model.
    """
    conversions, found = _conversions(model), {}
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter) and _interleaves(entry)]
    for name in names:
        if any(name.endswith(converter.target_patterns[0]) for converter in converters):
            marks = {name: torch.empty(1, 2, 1)}
            (found[name],) = map(str, revert_weight_conversion(_Conversions(conversions, model.config), marks))
    return found


def _interleaves(converter: WeightConverter) -> bool:
    """Whether a conversion de-interleaves the rows of the two halves of stacked experts."""
    operations = [operation for operation in converter.operations if not _dequantizes(operation)]
    known = [type(operation) for operation in operations] == [Interleave] and len(converter.target_patterns) == 1
    return known and operations[0].dim == 1 and not operations[0].inverse


def _dequantizes(operation: Any) -> bool:
    """Whether an operation returns weights without scales as they are (Inkling 2 Loop, since transformers 5.24)."""
    return type(operation).__name__ == "Inkling2LoopDequantizeExperts"


def is_renaming(converter: WeightConverter) -> bool:
    """Whether a conversion only renames a tensor, if its other source tensors, the scales, are missing."""
    return all(map(_dequantizes, converter.operations))


def merged_parts(
    model: ShardedModel, shapes: Mapping[str, Sequence[int]]
) -> dict[str, tuple[Merge, dict[str, Tensor]]]:
    """Map each tensor that transformers merges from several to the function, and to empty tensors by saved name.

    Args:
        model: the model, or a stage of it.
        shapes: the shapes of the full tensors, by their names in the full model.
    """
    conversions = _conversions(model)
    found: dict[str, tuple[Merge, dict[str, Tensor]]] = {}
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter) and _merges(entry)]
    for name, shape in shapes.items():
        converter = next((entry for entry in converters if name.endswith(entry.target_patterns[0])), None)
        if converter is not None:
            empty = {name: torch.empty(tuple(shape), device="meta")}
            saved = revert_weight_conversion(_Conversions(conversions, model.config), empty)
            found[name] = partial(_merge, converter), saved
    return found


def _merge(converter: WeightConverter, parts: Sequence[Tensor]) -> Tensor:
    by_pattern = dict(zip(converter.source_patterns, parts, strict=True))
    names = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
    merged: Mapping[str, Tensor] = converter.operations[0].convert(by_pattern, **names)
    return merged[converter.target_patterns[0]]


def _merges(converter: WeightConverter) -> bool:
    """Whether a conversion merges the queries of messages (Inkling 2 Loop, since transformers 5.24)."""
    return [type(operation).__name__ for operation in converter.operations] == ["Inkling2LoopMergeMessageQueries"]


def padded_names(model: ShardedModel, names: Iterable[str]) -> set[str]:
    """Return the names of LM heads that transformers pads to ``config.vocab_size`` rows for saving.

    Args:
        model: the model, or a stage of it.
        names: the names of tensors in the full model.
    """
    converters = [entry for entry in _conversions(model) if isinstance(entry, WeightConverter) and is_unpadding(entry)]
    return {name for name in names if any(name.endswith(entry.target_patterns[0]) for entry in converters)}


def is_unpadding(converter: WeightConverter) -> bool:
    """Whether a conversion removes vocabulary padding. transformers 5.24 added it for Inkling 2."""
    return [type(operation).__name__ for operation in converter.operations] == ["Inkling2UnpadVocab"]


def _stacks(converter: WeightConverter, name: str) -> bool:
    """Whether a conversion stacks matrices into the parameter ``name``."""
    kinds = [type(operation) for operation in converter.operations]
    known = kinds in ([MergeModulelist], [MergeModulelist, Concatenate])
    return known and len(converter.target_patterns) == 1 and name.endswith(converter.target_patterns[0])


def stacking_reader(reader: CheckpointReader, model: ShardedModel) -> CheckpointReader:
    """Wrap a reader so that it returns the model's tensors where the checkpoint has single experts or other parts.

    Args:
        reader: the checkpoint. Its names may lack the base model's prefix or add it.
        model: the full model, on the meta device.

    Raises:
        CheckpointError: some matrices of a stack are missing.
    """
    prefix, found = f"{model.base_model_prefix}.", {}
    renamings = (str, lambda name: name.removeprefix(prefix), lambda name: prefix + name)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    for name, pieces in expert_pieces(model, shapes).items():
        if name in reader.tensors:
            continue
        for rename in renamings:
            own = [replace(piece, name=rename(piece.name)) for piece in pieces]
            missing = [piece.name for piece in own if piece.name not in reader.tensors]
            if not missing:
                found[name] = own
            elif len(missing) < len(own):
                raise CheckpointError(
                    f"{reader.directory} lacks {len(missing)} of the {len(own)} matrices of {name}, such as "
                    f"{missing[0]}: copy or save the checkpoint again"
                )
    reader = stacked_reader(reader, found) if found else reader
    parts: dict[str, list[str]] = {}
    for name, split in concatenated_parts(model, shapes).items():
        named = ([rename(part) for part in split] for rename in renamings)
        there = [each for each in named if reader.tensors.keys() >= {*each}]
        if there and name not in reader.tensors:
            parts[name] = there[0]
    reader = concatenated_reader(reader, parts) if parts else reader
    chunks = {
        saved: {rename(part): shapes[part][0] for part in own}
        for name, own in chunked_names(model, shapes).items()
        for rename in renamings
        if (saved := rename(name)) in reader.tensors
    }
    reader = chunked_reader(reader, chunks) if chunks else reader
    alternating = {
        name: saved
        for name, source in interleaved_names(model, shapes).items()
        for rename in renamings
        if (saved := rename(source)) in reader.tensors and name not in reader.tensors
    }
    reader = interleaved_reader(reader, alternating) if alternating else reader
    merges = {
        name: (sources, merge)
        for name, (merge, empty) in merged_parts(model, shapes).items()
        for rename in renamings
        if reader.tensors.keys() >= {*(sources := [rename(part) for part in empty])}
    }
    return merged_reader(reader, merges, shapes) if merges else reader


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
    conversions = _Conversions(_conversions(model), model.config)
    if not conversions._weight_conversions:
        return tensors, dict(layouts), dict(tied)

    def rename(name: str) -> str:
        (saved,) = revert_weight_conversion(conversions, {name: torch.empty(0)})
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
    split: _Conversions | None = None


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
            parts: Mapping[str, Tensor] = revert_weight_conversion(place.split, {place.name: self._tensors[place.name]})
            return parts[name]
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
