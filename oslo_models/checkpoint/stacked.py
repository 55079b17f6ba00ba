"""Stacks the experts of a mixture-of-experts layer that a checkpoint stores as separate matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor, range_layout, require_alike
from oslo_models.sharding.layout import Index, Layout


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
class StackedReader(CheckpointReader):
    """Checkpoint in which some tensors are stacks of stored matrices.

    Attributes:
        inner: the checkpoint with the matrices.
        pieces: the pieces of each stack.
    """

    inner: CheckpointReader | None = None
    pieces: Mapping[str, Sequence[Piece]] = field(default_factory=dict)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None
        if name not in self.pieces:
            return self.inner.read(name, layout, rank)
        if layout.shape != self.tensors[name].shape:
            raise ValueError(f"{name} in {self.directory} has shape {self.tensors[name].shape}, not {layout.shape}")
        out = torch.empty(layout.local_shape(rank), dtype=self.tensors[name].dtype)
        for wanted, local in layout.shard_indices(rank):
            self._copy_pieces(name, wanted, out[local])
        return out

    def _copy_pieces(self, name: str, wanted: Index, out: Tensor) -> None:
        """Copy the region ``wanted`` of a stack into ``out``, which has the same shape."""
        assert self.inner is not None
        experts, rows, columns = wanted
        for piece in self.pieces[name]:
            shape = self.inner.tensors[piece.name].shape
            first = piece.part * shape[0]
            start, stop = max(rows.start - first, 0), min(rows.stop - first, shape[0])
            if not (experts.start <= piece.expert < experts.stop and start < stop):
                continue
            target = out[piece.expert - experts.start, start + first - rows.start : stop + first - rows.start]
            if (start, stop) == (0, shape[0]):
                region = range_layout(shape, 1, columns.start, columns.stop)
            else:  # ranks shard the rows or the columns, never both
                region = range_layout(shape, 0, start, stop)
            target.copy_(self.inner.read(piece.name, region, 0))


def stacked_reader(reader: CheckpointReader, pieces: Mapping[str, Sequence[Piece]]) -> StackedReader:
    """Return a reader that replaces ``pieces`` by their stacks. The checkpoint must have all pieces.

    Raises:
        CheckpointError: the pieces of a stack have different shapes, or only some have a floating-point dtype.
    """
    tensors = dict(reader.tensors)
    for name, own in pieces.items():
        stored = [tensors.pop(piece.name) for piece in own]
        require_alike(reader, name, [piece.name for piece in own])
        rows, columns = stored[0].shape
        shape = (1 + max(piece.expert for piece in own), (1 + max(piece.part for piece in own)) * rows, columns)
        tensors[name] = StoredTensor(Layout(shape), stored[0].dtype, ())
    return StackedReader(
        reader.directory, reader.files, reader.grid, reader.manifest, tensors, inner=reader, pieces=pieces
    )
