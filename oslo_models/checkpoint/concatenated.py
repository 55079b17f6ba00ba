"""Concatenates tensors that a checkpoint stores separately, such as filters of queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor, range_layout, require_alike
from oslo_models.sharding.layout import Layout, Range


@dataclass(frozen=True)
class ConcatenatedReader(CheckpointReader):
    """Checkpoint in which some tensors are concatenations of stored tensors along the first dimension.

    Attributes:
        inner: the checkpoint with the parts.
        parts: the names of the parts of each tensor, in order.
    """

    inner: CheckpointReader | None = None
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None
        if name not in self.parts:
            return self.inner.read(name, layout, rank)
        if layout.shape != self.tensors[name].shape or layout.dim not in (None, 0):
            raise ValueError(f"{name} in {self.directory} has shape {self.tensors[name].shape}; not read as {layout}")
        out = torch.empty(layout.local_shape(rank), dtype=self.tensors[name].dtype)
        for wanted, local in layout.shard_indices(rank):
            self._copy_rows(name, (wanted[0].start, wanted[0].stop), out[local])
        return out

    def _copy_rows(self, name: str, wanted: Range, out: Tensor) -> None:
        """Copy the rows ``wanted`` of a tensor into ``out``, which has the same number of rows."""
        assert self.inner is not None
        first = 0
        for part in self.parts[name]:
            shape = self.inner.tensors[part].shape
            start, stop = max(wanted[0] - first, 0), min(wanted[1] - first, shape[0])
            if start < stop:
                rows = self.inner.read(part, range_layout(shape, 0, start, stop), 0)
                out[start + first - wanted[0] : stop + first - wanted[0]].copy_(rows)
            first += shape[0]


def concatenated_reader(reader: CheckpointReader, parts: Mapping[str, Sequence[str]]) -> ConcatenatedReader:
    """Return a reader that replaces ``parts`` by their concatenations. The checkpoint must have all parts.

    Raises:
        CheckpointError: parts of a tensor differ in shape, or only some have a floating-point dtype.
    """
    tensors = dict(reader.tensors)
    for name, own in parts.items():
        require_alike(reader, name, own, first_dim=1)
        stored = [tensors.pop(part) for part in own]
        shape = (sum(part.shape[0] for part in stored), *stored[0].shape[1:])
        tensors[name] = StoredTensor(Layout(shape), stored[0].dtype, ())
    return ConcatenatedReader(
        reader.directory, reader.files, reader.grid, reader.manifest, tensors, inner=reader, parts=parts
    )
