"""Reads stacked experts whose gate and up projections alternate row by row as those of a model, one after the other."""

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
    """A checkpoint in which the rows of some tensors ``[experts, 2 * width, hidden]`` come from two halves in turn.

    Attributes:
        inner: the checkpoint that holds them.
        sources: the names that they have there, by those of the tensors with one half after the other.
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
    """A layout whose first rank holds some rows of some experts."""
    (first, last), (start, stop) = experts, rows
    own, beside, elsewhere = ((start, stop),), ((0, start), (stop, shape[1])), ((0, shape[1]),)
    if (first, last) == (0, shape[0]):
        return Layout(shape, 1, (own, beside))
    before_and_after = ((0, first), (last, shape[0]))
    return Layout(shape, 1, (own, beside, elsewhere), ((experts,), (experts,), before_and_after))


def interleaved_reader(reader: CheckpointReader, sources: Mapping[str, str]) -> InterleavedReader:
    """A reader in which tensors with alternating rows are replaced by those with one half after the other.

    Args:
        sources: the names of these tensors in the checkpoint, by those of the others.

    Raises:
        CheckpointError: a tensor has an odd number of rows.
    """
    tensors = dict(reader.tensors)
    for name, source in sources.items():
        stored = tensors.pop(source)
        if len(stored.shape) != 3 or stored.shape[1] % 2:
            raise CheckpointError(
                f"{source} in {reader.directory} has shape {stored.shape}, and is {name} in the model, whose rows are "
                "those of two projections: copy or save the checkpoint again"
            )
        tensors[name] = replace(stored, layout=Layout(stored.shape), files=())
    return InterleavedReader(
        reader.directory, reader.files, reader.grid, reader.manifest, tensors, inner=reader, sources=sources
    )
