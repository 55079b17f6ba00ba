"""Reads any rank's part of any tensor from any kind of checkpoint, whatever the number of ranks that saved it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.streams import DTYPE_NAMES
from oslo_models.checkpoint.weights import TensorInfo, WeightsFile
from oslo_models.layout import Layout


@dataclass(frozen=True)
class Piece:
    """A run ``[start, stop)`` of the divided dimension of a tensor, which begins at ``local_start`` in ``file``."""

    file: WeightsFile
    local_start: int = 0
    start: int = 0
    stop: int = 0


@dataclass(frozen=True)
class Stored:
    info: TensorInfo
    dim: int | None
    pieces: tuple[Piece, ...]

    @classmethod
    def of(cls, layout: Layout, dtype: torch.dtype, files: Sequence[WeightsFile]) -> Stored:
        """A tensor divided by ``layout`` over ``files``: pieces that cover it without overlap."""
        info = TensorInfo(layout.shape, dtype)
        if layout.dim is None:
            return cls(info, None, (Piece(files[0]),))
        runs = []
        for rank, ranges in enumerate(layout.ranges):
            local = 0
            for start, stop in ranges:
                runs.append((start, stop, rank, local))
                local += stop - start
        pieces, edge = [], 0
        for start, stop, rank, local in sorted(runs):
            if stop > edge:  # what other ranks hold as well is read once
                first = max(start, edge)
                pieces.append(Piece(files[rank], local + first - start, first, stop))
                edge = stop
        return cls(info, layout.dim, tuple(pieces))


class LazySlice:
    """One rank's part of a tensor in a checkpoint, read when it is indexed: what transformers' loader accepts."""

    def __init__(self, reader: CheckpointReader, name: str, layout: Layout, rank: int) -> None:
        self._read = lambda: reader.read(name, layout, rank)
        self.shape = torch.Size(layout.local_shape(rank))
        self.dtype = reader.tensors[name].dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._read()[index]

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type as safetensors spells it: ``"F32"``."""
        return DTYPE_NAMES[self.dtype]

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point


class CheckpointReader:
    """The tensors of one checkpoint. Made by `open_checkpoint`; threads may read at the same time.

    Attributes:
        where: the directory, for messages.
        tensors: the global shape and the type of every tensor, by name.
        split: the ``(tp, pp)`` at which it was saved; ``None`` when the checkpoint is merged.
        manifest: what its manifest says; ``None`` without a manifest.
        files: its weights files.
    """

    def __init__(
        self,
        where: Path,
        files: Mapping[str, WeightsFile],
        stored: Mapping[str, Stored],
        split: tuple[int, int] | None,
        manifest: dict[str, Any] | None,
    ) -> None:
        self.where, self.files, self.split, self.manifest = where, dict(files), split, manifest
        self.tensors = {name: entry.info for name, entry in stored.items()}
        self._stored = dict(stored)

    def read(self, name: str, layout: Layout, rank: int) -> Tensor:
        """The part of ``name`` that ``rank`` holds under ``layout``, in memory of its own; nothing else is read.

        Raises:
            ValueError: the layout is of another shape than the tensor.
            KeyError: there is no such tensor.
        """
        stored = self._stored[name]
        if layout.shape != stored.info.shape:
            raise ValueError(
                f"{name} in {self.where} has shape {stored.info.shape}, but the model needs {layout.shape}"
            )
        out = torch.empty(layout.local_shape(rank), dtype=stored.info.dtype)
        offset = 0
        for start, stop in [(0, 0)] if layout.dim is None else layout.ranges[rank]:
            for piece in stored.pieces:
                wanted = _box(layout.shape, layout.dim, start, stop)
                there = _box(layout.shape, stored.dim, piece.start, piece.stop)
                both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(wanted, there, strict=True)]
                if all(a < b for a, b in both):
                    source = _slices(both, stored.dim, piece.local_start - piece.start)
                    piece.file.copy(name, source, out[_slices(both, layout.dim, offset - start)])
            offset += stop - start
        return out

    def slice(self, name: str, layout: Layout, rank: int) -> LazySlice:
        """The same part as `read`, for a loader that reads it later."""
        return LazySlice(self, name, layout, rank)

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _box(shape: Sequence[int], dim: int | None, start: int, stop: int) -> list[tuple[int, int]]:
    return [(start, stop) if d == dim else (0, size) for d, size in enumerate(shape)]


def _slices(box: Sequence[tuple[int, int]], dim: int | None, shift: int) -> tuple[slice, ...]:
    return tuple(slice(a + shift * (d == dim), b + shift * (d == dim)) for d, (a, b) in enumerate(box))
