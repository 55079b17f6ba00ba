"""Reads tensors that a checkpoint stores in other parts than the model: stacked, joined, split, interleaved, merged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor, require_alike
from oslo_models.sharding.layout import Index, Layout

Merge = Callable[[Sequence[Tensor]], Tensor]


class Conversion(Protocol):
    """Computes a tensor of the model from stored tensors."""

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        """Copy the region ``wanted`` of the tensor into ``out``, which has the same shape."""


@dataclass(frozen=True)
class ConvertedReader(CheckpointReader):
    """Checkpoint in which some tensors are computed from stored tensors.

    Attributes:
        inner: the checkpoint with the stored tensors.
        conversions: the conversion of each computed tensor.
    """

    inner: CheckpointReader | None = None
    conversions: Mapping[str, Conversion] = field(default_factory=dict)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None
        return super().read(name, layout, rank) if name in self.conversions else self.inner.read(name, layout, rank)

    def is_stored(self, name: str) -> bool:
        assert self.inner is not None
        return name not in self.conversions and self.inner.is_stored(name)

    def copy_region(self, name: str, wanted: Index, out: Tensor, shape: tuple[int, ...] | None = None) -> None:
        assert self.inner is not None
        if name in self.conversions:
            self.conversions[name].copy(self.inner, wanted, out)
        else:
            self.inner.copy_region(name, wanted, out, shape)


@dataclass(frozen=True)
class Piece:
    """A matrix in a stack ``[experts, parts * rows, columns]``.

    Attributes:
        name: its name in the checkpoint.
        expert: its index in the first dimension.
        part: its index among the matrices that are concatenated along the second dimension.
    """

    name: str
    expert: int
    part: int


@dataclass(frozen=True)
class _Stack:
    """Experts of a mixture-of-experts layer that the checkpoint stores as separate matrices."""

    pieces: Sequence[Piece]

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        experts, rows, columns = wanted
        for piece in self.pieces:
            size = reader.tensors[piece.name].shape[0]
            if experts.start <= piece.expert < experts.stop:
                target = out[piece.expert - experts.start]
                _copy_rows(reader, piece.name, piece.part * size, size, (rows, columns), target)


@dataclass(frozen=True)
class _Concatenation:
    """Tensors that are concatenated along a dimension, such as filters of queries, keys and values."""

    dim: int
    parts: Sequence[str]

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        first = 0
        for part in self.parts:
            size = reader.tensors[part].shape[self.dim]
            _copy_rows(reader, part, first, size, wanted, out, self.dim)
            first += size


def _copy_rows(
    reader: CheckpointReader, part: str, first: int, size: int, wanted: Index, out: Tensor, dim: int = 0
) -> None:
    """Copy the wanted rows of a part, which are the rows ``first:first + size`` of its concatenation, into ``out``."""
    rows = wanted[dim]
    start, stop = max(rows.start, first), min(rows.stop, first + size)
    if start < stop:
        region = (*wanted[:dim], slice(start - first, stop - first), *wanted[dim + 1 :])
        out.narrow(dim, start - rows.start, stop - start).copy_(reader.read_region(part, region))


@dataclass(frozen=True)
class _Rows:
    """Row range of a fused tensor, such as the query, key and value projections of an attention."""

    source: str
    first: int

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        rows, *others = wanted
        region = (slice(self.first + rows.start, self.first + rows.stop), *others)
        reader.copy_region(self.source, region, out)


@dataclass(frozen=True)
class _Interleaved:
    """Tensor ``[experts, 2 * width, hidden]`` that is stored with alternating rows of its two halves."""

    source: str

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        experts, rows, columns = wanted
        half = reader.tensors[self.source].shape[1] // 2
        for part in range(2):
            first = part * half
            start, stop = max(rows.start, first), min(rows.stop, first + half)
            if start < stop:
                both = reader.read_region(
                    self.source, (experts, slice(2 * (start - first), 2 * (stop - first)), columns)
                )
                out[:, start - rows.start : stop - rows.start].copy_(both[:, part::2])


@dataclass(frozen=True)
class _EverySecond:
    """Every second row of a stored tensor, along a dimension."""

    source: str
    first: int
    dim: int

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        rows = wanted[self.dim]
        region = (*wanted[: self.dim], slice(2 * rows.start, 2 * rows.stop), *wanted[self.dim + 1 :])
        both = reader.read_region(self.source, region)
        out.copy_(both.unflatten(self.dim, (-1, 2)).select(self.dim + 1, self.first))


@dataclass(frozen=True)
class _Paired:
    """Tensor whose heads are stored in rotary pairs of rows: the first of each half, the second of each half, ..."""

    source: str
    half: int

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        rows, *others = wanted
        head = 2 * self.half
        first, last = rows.start // head * head, -(-rows.stop // head) * head
        heads = reader.read_region(self.source, (slice(first, last), *others)).unflatten(0, (-1, self.half, 2))
        out.copy_(heads.transpose(1, 2).flatten(0, 2)[rows.start - first : rows.stop - first])


@dataclass(frozen=True)
class _Transposed:
    """Stacked matrices that are stored transposed."""

    source: str

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        experts, rows, columns = wanted
        out.copy_(reader.read_region(self.source, (experts, columns, rows)).transpose(1, 2))


@dataclass(frozen=True)
class _Merged:
    """Function of several stored tensors that are read in full, such as interleaved queries."""

    name: str
    parts: Sequence[str]
    merge: Merge
    shape: tuple[int, ...]

    def copy(self, reader: CheckpointReader, wanted: Index, out: Tensor) -> None:
        whole = self.merge([reader.read(part, Layout(reader.tensors[part].shape), 0) for part in self.parts])
        if whole.shape != self.shape:
            raise CheckpointError(
                f"{', '.join(self.parts)} in {reader.directory} make a tensor of shape {tuple(whole.shape)}, and "
                f"{self.name} has shape {self.shape} in the model: use the configuration of the checkpoint"
            )
        out.copy_(whole[wanted])


Made = dict[str, tuple[tuple[int, ...], torch.dtype, Conversion]]
"""Shape, dtype and conversion of each computed tensor."""


def _with(reader: CheckpointReader, made: Made, sources: set[str]) -> CheckpointReader:
    """Return a reader that has the computed tensors in place of their sources."""
    if not made:
        return reader
    tensors = {name: stored for name, stored in reader.tensors.items() if name not in sources}
    tensors |= {name: StoredTensor(Layout(tuple(shape)), dtype, ()) for name, (shape, dtype, _) in made.items()}
    conversions = {name: conversion for name, (*_, conversion) in made.items()}
    files = reader.directory, reader.files, reader.grid, reader.manifest
    return ConvertedReader(*files, tensors, inner=reader, conversions=conversions)


def with_stacks(reader: CheckpointReader, stacks: Mapping[str, Sequence[Piece]]) -> CheckpointReader:
    """Replace the pieces of each stack by the stack. The checkpoint must have all pieces.

    Raises:
        CheckpointError: the pieces of a stack have different shapes, or only some have a floating-point dtype.
    """
    made: Made = {}
    for name, pieces in stacks.items():
        require_alike(reader, name, [piece.name for piece in pieces])
        first = reader.tensors[pieces[0].name]
        rows, columns = first.shape
        parts = 1 + max(piece.part for piece in pieces)
        shape = (1 + max(piece.expert for piece in pieces), parts * rows, columns)
        made[name] = shape, first.dtype, _Stack(pieces)
    return _with(reader, made, {piece.name for pieces in stacks.values() for piece in pieces})


def with_concatenations(
    reader: CheckpointReader, concatenations: Mapping[str, tuple[int, Sequence[str]]]
) -> CheckpointReader:
    """Replace the parts of each concatenation by it. The checkpoint must have all parts.

    Args:
        concatenations: the dimension and the parts of each concatenation.

    Raises:
        CheckpointError: parts of a tensor differ in shape, or only some have a floating-point dtype.
    """
    made: Made = {}
    for name, (dim, parts) in concatenations.items():
        require_alike(reader, name, parts, dim=dim)
        stored = [reader.tensors[part] for part in parts]
        before, after = stored[0].shape[:dim], stored[0].shape[dim + 1 :]
        shape = (*before, sum(part.shape[dim] for part in stored), *after)
        made[name] = shape, stored[0].dtype, _Concatenation(dim, parts)
    return _with(reader, made, {part for _, parts in concatenations.values() for part in parts})


def with_chunks(reader: CheckpointReader, chunks: Mapping[str, Mapping[str, int]]) -> CheckpointReader:
    """Replace fused tensors by their parts.

    Args:
        chunks: for each fused tensor, the names of its parts and their numbers of rows, in order.

    Raises:
        CheckpointError: a tensor has another number of rows than its parts together.
    """
    made: Made = {}
    for source, parts in chunks.items():
        stored, first = reader.tensors[source], 0
        if stored.shape[0] != sum(parts.values()):
            raise CheckpointError(
                f"{source} in {reader.directory} has {stored.shape[0]} rows, but its {len(parts)} parts in the model "
                f"({', '.join(parts)}) have {sum(parts.values())}: use the configuration of the checkpoint, or copy or "
                "save the checkpoint again"
            )
        for name, rows in parts.items():
            made[name] = (rows, *stored.shape[1:]), stored.dtype, _Rows(source, first)
            first += rows
    return _with(reader, made, set(chunks))


def with_alternations(
    reader: CheckpointReader, alternations: Mapping[str, tuple[int, Sequence[str]]]
) -> CheckpointReader:
    """Replace tensors with alternating rows of two tensors by these.

    Args:
        alternations: the dimension of the rows and the names of the two tensors, by the name of the stored tensor.

    Raises:
        CheckpointError: a tensor has an odd number of rows.
    """
    made: Made = {}
    for source, (dim, names) in alternations.items():
        stored = reader.tensors[source]
        if stored.shape[dim] % 2:
            raise CheckpointError(
                f"{source} in {reader.directory} has shape {stored.shape}, but its rows alternate between "
                f"{' and '.join(names)} in the model: copy or save the checkpoint again"
            )
        shape = (*stored.shape[:dim], stored.shape[dim] // 2, *stored.shape[dim + 1 :])
        made |= {name: (shape, stored.dtype, _EverySecond(source, i, dim)) for i, name in enumerate(names)}
    return _with(reader, made, set(alternations))


def with_halves(reader: CheckpointReader, interleaved: Mapping[str, str]) -> CheckpointReader:
    """Replace interleaved tensors by tensors with their first rows first, then their second rows.

    Args:
        interleaved: the name of each interleaved tensor in the checkpoint, by the name of the tensor in the model.

    Raises:
        CheckpointError: a tensor has an odd number of rows.
    """
    made: Made = {}
    for name, source in interleaved.items():
        stored = reader.tensors[source]
        if len(stored.shape) != 3 or stored.shape[1] % 2:
            raise CheckpointError(
                f"{source} in {reader.directory} has shape {stored.shape}, but the rows of {name} in the model "
                "alternate between two projections: copy or save the checkpoint again"
            )
        made[name] = stored.shape, stored.dtype, _Interleaved(source)
    return _with(reader, made, set(interleaved.values()))


def with_pairs(reader: CheckpointReader, halves: Mapping[str, int]) -> CheckpointReader:
    """Replace tensors whose heads are stored in rotary pairs of rows by tensors with the halves of each head in turn.

    Args:
        halves: half of the rows of a head, by the name of the tensor.
    """
    made: Made = {}
    for name, half in halves.items():
        stored = reader.tensors[name]
        made[name] = tuple(stored.shape), stored.dtype, _Paired(name, half)
    return _with(reader, made, set())


def with_transposes(reader: CheckpointReader, transposed: Mapping[str, str]) -> CheckpointReader:
    """Replace stacked matrices ``[experts, rows, columns]`` by their transposes.

    Args:
        transposed: the name of each stack in the checkpoint, by the name of the tensor in the model.
    """
    made: Made = {}
    for name, source in transposed.items():
        experts, rows, columns = reader.tensors[source].shape
        made[name] = (experts, columns, rows), reader.tensors[source].dtype, _Transposed(source)
    return _with(reader, made, set(transposed.values()))


def with_merges(
    reader: CheckpointReader,
    merges: Mapping[str, tuple[Sequence[str], Merge]],
    shapes: Mapping[str, tuple[int, ...]],
) -> CheckpointReader:
    """Replace the parts of merged tensors by these tensors. The checkpoint must have all parts.

    Args:
        merges: for each merged tensor, the names of its parts and the function that merges them.
        shapes: the shape of each merged tensor.

    Raises:
        CheckpointError: parts of a tensor differ in shape, or only some have a floating-point dtype.
    """
    made: Made = {}
    for name, (parts, merge) in merges.items():
        require_alike(reader, name, parts)
        shape = tuple(shapes[name])
        made[name] = shape, reader.tensors[parts[0]].dtype, _Merged(name, parts, merge, shape)
    return _with(reader, made, {part for parts, _ in merges.values() for part in parts})
