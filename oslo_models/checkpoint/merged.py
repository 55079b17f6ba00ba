"""Computes tensors from several tensors of a checkpoint that are read in full, such as interleaved queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor, require_alike
from oslo_models.sharding.layout import Layout

Merge = Callable[[Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class MergedReader(CheckpointReader):
    """Checkpoint in which some tensors are functions of several stored tensors.

    Attributes:
        inner: the checkpoint with the parts.
        merges: for each tensor of the model, the names of its parts and the function that merges them.
    """

    inner: CheckpointReader | None = None
    merges: Mapping[str, tuple[Sequence[str], Merge]] = field(default_factory=dict)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        assert self.inner is not None
        if name not in self.merges:
            return self.inner.read(name, layout, rank)
        parts, merge = self.merges[name]
        whole = merge([self.inner.read(part, Layout(self.inner.tensors[part].shape), 0) for part in parts])
        if whole.shape != layout.shape:
            raise CheckpointError(
                f"{', '.join(parts)} in {self.directory} make a tensor of shape {tuple(whole.shape)}, and {name} has "
                f"shape {layout.shape} in the model: use the configuration of the checkpoint"
            )
        out = torch.empty(layout.local_shape(rank), dtype=whole.dtype)
        for wanted, local in layout.shard_indices(rank):
            out[local].copy_(whole[wanted])
        return out


def merged_reader(
    reader: CheckpointReader,
    merges: Mapping[str, tuple[Sequence[str], Merge]],
    shapes: Mapping[str, tuple[int, ...]],
) -> MergedReader:
    """Return a reader that replaces the parts in ``merges`` by the merged tensors. The checkpoint must have all parts.

    Args:
        merges: as in `MergedReader`.
        shapes: the shape of each merged tensor.

    Raises:
        CheckpointError: parts of a tensor differ in shape, or only some have a floating-point dtype.
    """
    tensors = dict(reader.tensors)
    for name, (parts, _) in merges.items():
        require_alike(reader, name, parts)
        stored = [tensors.pop(part) for part in parts]
        tensors[name] = StoredTensor(Layout(shapes[name]), stored[0].dtype, ())
    return MergedReader(
        reader.directory, reader.files, reader.grid, reader.manifest, tensors, inner=reader, merges=merges
    )
