"""One weights file, read a few pages at a time."""

from __future__ import annotations

import ctypes
import mmap
import os
import zipfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError

_BLOCK = 4 << 20
_libc = ctypes.CDLL(None)


class WeightsFile:
    """A ``.safetensors`` or ``.bin`` file, mapped into memory.

    Pages of a mapping that were touched count as this process's memory, so tensors are copied out in blocks and the
    pages given back after each. The file stays open, so that it is the same one even after a save has replaced it.
    """

    fd = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size

    @cached_property
    def views(self) -> dict[str, Tensor]:
        """The tensors in the mapped memory: what is not touched is not read.

        Raises:
            CheckpointError: the file is truncated, or not a weights file.
        """
        if self.fd < 0:
            raise ValueError(f"{self.path} was closed; open the checkpoint again")
        path = f"/proc/self/fd/{self.fd}" if os.path.exists("/proc/self/fd") else str(self.path)
        try:
            if self.path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            # Files of torch before 1.6 are no zip files, and cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            return {name: tensor.detach() for name, tensor in state.items() if isinstance(tensor, Tensor)}
        except Exception as error:
            raise CheckpointError(
                f"{self.path} ({self.size} bytes) cannot be read as weights: {type(error).__name__}: {error}; it is "
                "truncated, damaged or not a weights file: copy or save it again"
            ) from error

    def copy(self, view: Tensor, out: Tensor) -> None:
        """Copy a part of one of the views into ``out``, which has its shape."""
        view, out = torch.atleast_1d(view), torch.atleast_1d(out)
        rows = max(1, _BLOCK // max(1, view.stride(0) * view.itemsize))
        for block, place in zip(view.split(rows), out.split(rows), strict=True):
            place.copy_(block)
            self.give_back(block)

    def give_back(self, block: Tensor | None = None) -> None:
        """Let the system take back the pages that were touched to read a block of a view, or all."""
        first, end = self._bounds
        if block is not None:
            start = block.data_ptr()
            reach = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True)) + 1
            first, end = max(first, start - start % mmap.PAGESIZE), min(end, start + reach * block.itemsize)
        if first < end:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)

    @cached_property
    def _bounds(self) -> tuple[int, int]:
        """The addresses between which the file is mapped; none when it is not.

        They are those in which a view lies. Giving back pages of other memory would clear them, hence this care.
        """
        address, inode = max((view.data_ptr() for view in self.views.values()), default=0), os.fstat(self.fd).st_ino
        with suppress(FileNotFoundError), open("/proc/self/maps") as maps:
            for line in maps:
                bounds, _, _, _, mapped, *_ = line.split()
                first, end = (int(bound, 16) for bound in bounds.split("-"))
                if first <= address < end and int(mapped) == inode:
                    return first, end
        return 0, 0

    def close(self) -> None:
        self.__dict__.pop("views", None)
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    __del__ = close
