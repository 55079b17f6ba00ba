"""Reads stacked experts with interleaved gate and up rows. The model has all gate rows first, then all up rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.reader import CheckpointReader
from oslo_models.sharding.layout import Layout, Range


@dataclass(frozen=True)
class InterleavedReader(CheckpointReader):
    """Checkpoint in which some tensors ``[experts, 2 * width, hidden]`` interleave the rows of their two halves.

    Attributes:
        inner: the checkpoint with the interleaved tensors.
        sources: the name of each interleaved tensor in the checkpoint, by the name of the tensor in the model.
    """

    inner: CheckpointReader | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None
        if name not in self.sources:
            return self.inner.read(name, layout, rank)
        shape = self.tensors[name].shape
        if layout.shape != shape:
            raise ValueError(f"{name} in {self.directory} has shape {shape}, not {layout.shape}")
        half = shape[1] // 2
        out = torch.empty(layout.local_shape(rank), dtype=self.tensors[name].dtype)
        for (experts, rows, columns), local in layout.shard_indices(rank):
            for part in range(2):
                first = part * half
                start, stop = max(rows.start, first), min(rows.stop, first + half)
                if start < stop:
                    own = _region(shape, (experts.start, experts.stop), (2 * (start - first), 2 * (stop - first)))
                    read = self.inner.read(self.sources[name], own, 0)[:, part::2]
                    out[local][:, start - rows.start : stop - rows.start].copy_(read[..., columns])
        return out


def _region(shape: tuple[int, ...], experts: Range, rows: Range) -> Layout:
    """Return a layout in which rank 0 holds these rows of these experts."""
    (first, last), (start, stop) = experts, rows
    own, beside, elsewhere = ((start, stop),), ((0, start), (stop, shape[1])), ((0, shape[1]),)
    if (first, last) == (0, shape[0]):
        return Layout(shape, 1, (own, beside))
    before_and_after = ((0, first), (last, shape[0]))
    return Layout(shape, 1, (own, beside, elsewhere), ((experts,), (experts,), before_and_after))


def interleaved_reader(reader: CheckpointReader, sources: Mapping[str, str]) -> InterleavedReader:
    """Return a reader that gives interleaved tensors in the layout of the model.

    Args:
        sources: the name of each interleaved tensor in the checkpoint, by the name of the tensor in the model.

    Raises:
        CheckpointError: a tensor has an odd number of rows.
    """
    tensors = dict(reader.tensors)
    for name, source in sources.items():
        stored = tensors.pop(source)
        if len(stored.shape) != 3 or stored.shape[1] % 2:
            raise CheckpointError(
                f"{source} in {reader.directory} has shape {stored.shape}, but the rows of {name} in the model "
                "alternate between two projections: copy or save the checkpoint again"
            )
        tensors[name] = replace(stored, layout=Layout(stored.shape), files=())
    return InterleavedReader(
        reader.directory, reader.files, reader.grid, reader.manifest, tensors, inner=reader, sources=sources
    )
