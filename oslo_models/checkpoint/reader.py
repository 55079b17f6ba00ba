"""Reads any rank's shard of a tensor from a checkpoint that was saved with any parallel sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.serialization import dtype_name
from oslo_models.checkpoint.weights_file import WeightsFile
from oslo_models.sharding.layout import Index, Layout


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
        layout: the full shape and the sharding over the files.
        dtype: the stored dtype.
        files: the file of each shard; one file for a tensor without sharding.
    """

    layout: Layout
    dtype: torch.dtype
    files: Sequence[WeightsFile]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


class LazySlice:
    """One rank's shard of a tensor in a checkpoint. Indexing reads it.

    Implements the interface of safetensors' slices, which transformers' loader accepts in a ``state_dict``.

    Attributes:
        buffers: the `PinnedBuffers` through which indexing reads the shard into memory of a GPU; ``None`` for memory of
            the host.
    """

    buffers: Any = None

    def __init__(self, reader: CheckpointReader, name: str, layout: Layout, rank: int) -> None:
        self.reader, self.name, self.layout, self.rank = reader, name, layout, rank
        self.shape = torch.Size(layout.local_shape(rank))
        self.dtype = reader.tensors[name].dtype

    def read(self) -> Tensor:
        """Read the shard into new memory of the host."""
        return self.reader.read(self.name, self.layout, self.rank)

    def __getitem__(self, index: Any) -> Tensor:
        tensor: Tensor = self.read() if self.buffers is None else self.buffers.read(self)
        return tensor[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The name of the dtype in safetensors: ``"F32"``."""
        return dtype_name(self.dtype)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class CheckpointReader:
    """Reader of one checkpoint, created by `open_checkpoint`. Several threads may read concurrently.

    Attributes:
        directory: the directory of the checkpoint.
        files: the weights files, by name.
        grid: the names of split files by ``(rank, pp_rank)``; empty when the checkpoint is merged.
        manifest: the content of the manifest; ``None`` without one.
        tensors: all tensors, by name.
    """

    directory: Path
    files: dict[str, WeightsFile]
    grid: dict[tuple[int, int], str]
    manifest: dict[str, Any] | None
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    @property
    def split(self) -> tuple[int, int] | None:
        """The parallel sizes ``(tp, pp)`` of split files; ``None`` when the checkpoint is merged."""
        return (max(t for t, _ in self.grid) + 1, max(p for _, p in self.grid) + 1) if self.grid else None

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        """Read only the shard of a tensor that ``layout`` assigns to ``rank``.

        Args:
            name: the name of the tensor.
            layout: the sharding over the reading ranks. It may differ from the layout in the files.
            rank: the rank in ``layout``.

        Returns:
            The shard in newly allocated memory.

        Raises:
            ValueError: the layout and the tensor differ in shape.
            KeyError: there is no such tensor.
        """
        stored = self.tensors[name]
        if layout.shape != stored.shape:
            raise ValueError(f"{name} in {self.directory} has shape {stored.shape}, but the model needs {layout.shape}")
        out = torch.empty(layout.local_shape(rank), dtype=stored.dtype)
        for wanted, local in layout.shard_indices(rank):
            self.copy_region(name, wanted, out[local])
        return out

    def read_region(self, name: str, region: Index, shape: tuple[int, ...] | None = None) -> Tensor:
        """Read only a rectangular region of a full tensor.

        Args:
            name: the name of the tensor.
            region: a slice with both bounds for every dimension.
            shape: reshape the tensor to this shape first. Only for tensors without sharding.

        Returns:
            The region in newly allocated memory.

        Raises:
            KeyError: there is no such tensor.
        """
        out = torch.empty([each.stop - each.start for each in region], dtype=self.tensors[name].dtype)
        self.copy_region(name, region, out, shape)
        return out

    def copy_region(self, name: str, wanted: Index, out: Tensor, shape: tuple[int, ...] | None = None) -> None:
        """Copy the region ``wanted`` of a full tensor into ``out``, which has the same shape."""
        stored, local = self.tensors[name], tuple(slice(0, size) for size in out.shape)
        if shape is not None:
            (file,) = stored.files
            file.copy(file.views[name].view(shape)[wanted], out)
            return
        for part, file in enumerate(stored.files):
            for available, in_file in stored.layout.owned_indices(part):
                bounds = zip(wanted, available, strict=True)
                common = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in bounds)
                if all(interval.start < interval.stop for interval in common):
                    source = file.views[name][_translate(common, available, in_file)]
                    file.copy(source, out[_translate(common, wanted, local)])

    def is_stored(self, name: str) -> bool:
        """Return whether the files contain the tensor itself. Then reading it in parts reads nothing twice."""
        return name in self.tensors

    def slice(self, name: str, layout: Layout, rank: int) -> LazySlice:
        """Return the shard of `read` as a lazy slice."""
        return LazySlice(self, name, layout, rank)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _translate(index: Index, full: Index, local: Index) -> Index:
    """Translate an index of the full tensor to a shard that stores the region ``full`` at ``local``."""
    shifts = [b.start - a.start for a, b in zip(full, local, strict=True)]
    return tuple(slice(i.start + shift, i.stop + shift) for i, shift in zip(index, shifts, strict=True))


def require_alike(reader: CheckpointReader, whole: str, parts: Sequence[str], dim: int | None = None) -> None:
    """Raise ``CheckpointError`` unless the parts of a tensor agree in size and in kind of dtype (float or not).

    Args:
        whole: the name of the full tensor, for the message.
        dim: the dimension in which they may differ.
    """
    first = reader.tensors[parts[0]]
    for name in parts[1:]:
        part = reader.tensors[name]
        pairs = enumerate(zip(part.shape, first.shape, strict=False))
        fits = len(part.shape) == len(first.shape) and all(a == b or i == dim for i, (a, b) in pairs)
        if not fits or part.dtype.is_floating_point != first.dtype.is_floating_point:
            raise CheckpointError(
                f"{reader.directory}: {name} is a {tuple(part.shape)} of {part.dtype}, and {parts[0]} a "
                f"{tuple(first.shape)} of {first.dtype}: both are in {whole}; copy or save the checkpoint again"
            )
