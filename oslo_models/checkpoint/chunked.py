"""Reads fused tensors, such as the query, key and value projections of an attention, as the model's separate ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor, range_layout
from oslo_models.sharding.layout import Layout, Range


@dataclass(frozen=True)
class ChunkedReader(CheckpointReader):
    """Checkpoint in which some tensors are row ranges of fused tensors.

    Attributes:
        inner: the checkpoint with the fused tensors.
        chunks: for each tensor of the model, the name of the fused tensor and the range of its rows.
    """

    inner: CheckpointReader | None = None
    chunks: Mapping[str, tuple[str, Range]] = field(default_factory=dict)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None
        if name not in self.chunks:
            return self.inner.read(name, layout, rank)
        if layout.shape != self.tensors[name].shape:
            raise ValueError(f"{name} in {self.directory} has shape {self.tensors[name].shape}, not {layout.shape}")
        source, (first, _) = self.chunks[name]
        out = torch.empty(layout.local_shape(rank), dtype=self.tensors[name].dtype)
        for (rows, *others), local in layout.shard_indices(rank):
            region = range_layout(self.inner.tensors[source].shape, 0, first + rows.start, first + rows.stop)
            out[local].copy_(self.inner.read(source, region, 0)[(slice(None), *others)])
        return out


def chunked_reader(reader: CheckpointReader, chunks: Mapping[str, Mapping[str, int]]) -> ChunkedReader:
    """Return a reader that splits each fused tensor named in ``chunks``.

    Args:
        chunks: for each fused tensor, the names of its parts and their numbers of rows, in order.

    Raises:
        CheckpointError: a tensor has another number of rows than its parts together.
    """
    tensors, places = dict(reader.tensors), {}
    for source, parts in chunks.items():
        stored, first = tensors.pop(source), 0
        if stored.shape[0] != sum(parts.values()):
            raise CheckpointError(
                f"{source} in {reader.directory} has {stored.shape[0]} rows, but its {len(parts)} parts in the model "
                f"({', '.join(parts)}) have {sum(parts.values())}: use the configuration of the checkpoint, or copy or "
                "save the checkpoint again"
            )
        for name, rows in parts.items():
            tensors[name] = StoredTensor(Layout((rows, *stored.shape[1:])), stored.dtype, ())
            places[name] = source, (first, first + rows)
            first += rows
    return ChunkedReader(
        reader.directory, reader.files, reader.grid, reader.manifest, tensors, inner=reader, chunks=places
    )
