"""Reads any rank's part of any tensor from any kind of checkpoint, whatever the number of ranks that saved it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.serialization import dtype_name
from oslo_models.checkpoint.weights_file import WeightsFile
from oslo_models.sharding.layout import Index, Layout


@dataclass(frozen=True)
class Stored:
    """A tensor in a checkpoint: how it was divided, and over which files (one, where every file has the whole)."""

    layout: Layout
    dtype: torch.dtype
    files: Sequence[WeightsFile]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.shape


class LazySlice:
    """One rank's part of a tensor in a checkpoint, read when it is indexed: what transformers' loader accepts."""

    def __init__(self, reader: CheckpointReader, name: str, layout: Layout, rank: int) -> None:
        self.reader, self.name, self.layout, self.rank = reader, name, layout, rank
        self.shape = torch.Size(layout.local_shape(rank))
        self.dtype = reader.tensors[name].dtype

    def read(self) -> Tensor:
        return self.reader.read(self.name, self.layout, self.rank)

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type as safetensors spells it: ``"F32"``."""
        return dtype_name(self.dtype)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


@dataclass(frozen=True)
class CheckpointReader:
    """The tensors of one checkpoint. Made by `open_checkpoint`; threads may read at the same time.

    Attributes:
        directory: for messages.
        files: its weights files.
        grid: the names of split files by ``(tp_rank, pp_rank)``; empty when the checkpoint is merged.
        manifest: what its manifest says; ``None`` without a manifest.
        tensors: the global shape and the type of every tensor, by name, and where it is.
    """

    directory: Path
    files: dict[str, WeightsFile]
    grid: dict[tuple[int, int], str]
    manifest: dict[str, Any] | None
    tensors: dict[str, Stored] = field(default_factory=dict)

    @property
    def split(self) -> tuple[int, int] | None:
        """The ``(tp, pp)`` at which it was saved; ``None`` when the checkpoint is merged."""
        return (max(t for t, _ in self.grid) + 1, max(p for _, p in self.grid) + 1) if self.grid else None

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        """The part of ``name`` that ``rank`` holds under ``layout``, in memory of its own; nothing else is read.

        Raises:
            ValueError: the layout is of another shape than the tensor.
            KeyError: there is no such tensor.
        """
        stored = self.tensors[name]
        if layout.shape != stored.shape:
            raise ValueError(f"{name} in {self.directory} has shape {stored.shape}, but the model needs {layout.shape}")
        pieces = [(file, place) for holder, file in enumerate(stored.files) for place in stored.layout.owned(holder)]
        out = torch.empty(layout.local_shape(rank), dtype=stored.dtype)
        for there, here in layout.places(rank):
            for file, (stored_there, stored_here) in pieces:
                bounds = zip(there, stored_there, strict=True)
                both = tuple(slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in bounds)
                if all(common.start < common.stop for common in both):
                    source = file.views[name][_shifted(both, stored_there, stored_here)]
                    file.copy(source, out[_shifted(both, there, here)])
        return out

    def slice(self, name: str, layout: Layout, rank: int) -> LazySlice:
        """The same part as `read`, for a loader that reads it later."""
        return LazySlice(self, name, layout, rank)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _shifted(part: Index, there: Index, here: Index) -> Index:
    """Where in the local tensor a part of the place ``there`` of the full tensor is, if ``there`` begins ``here``."""
    shifts = [b.start - a.start for a, b in zip(there, here, strict=True)]
    return tuple(slice(p.start + shift, p.stop + shift) for p, shift in zip(part, shifts, strict=True))
