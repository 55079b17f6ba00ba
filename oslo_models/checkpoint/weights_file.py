"""Reads one weights file through a memory mapping, a few pages at a time."""

from __future__ import annotations

import ctypes
import mmap
import os
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.locking import locked_property

_BLOCK = 4 << 20
"""Bytes to copy before their pages are released."""
_libc = ctypes.CDLL(None)


class WeightsFile:
    """A ``.safetensors`` or ``.bin`` file, mapped into memory.

    Pages read from a mapping count as resident memory of the process. So tensors are copied in blocks, and the pages
    are released after each block. Neither safetensors' slices nor `torch.load` do so. The file stays open, so that a
    reader keeps reading the same checkpoint after a save has replaced it. Threads may share a reader.
    """

    fd = -1

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fd = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self.fd).st_size

    @locked_property
    def views(self) -> dict[str, Tensor]:
        """The tensors by name, as views of the mapped memory. Access to a view reads the file.

        Raises:
            CheckpointError: the file is truncated or not a weights file.
        """
        if self.fd < 0:
            raise ValueError(f"{self.path} was closed; open the checkpoint again")
        path = f"/proc/self/fd/{self.fd}" if os.path.exists("/proc/self/fd") else str(self.path)
        try:
            if self.path.suffix == ".safetensors":
                file = safe_open(path, framework="pt")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            # Files of torch before 1.6 are not zip files and cannot be mapped.
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
            return {name: _plain(name, tensor) for name, tensor in state.items() if isinstance(tensor, Tensor)}
        except Exception as error:
            raise CheckpointError(
                f"{self.path} ({self.size} bytes) cannot be read as weights: {type(error).__name__}: {error}; it is "
                "truncated, damaged or not a weights file: copy or save it again"
            ) from error

    def copy(self, view: Tensor, out: Tensor) -> None:
        """Copy a slice of a view into ``out``, which has the same shape and dtype.

        Raises:
            CheckpointError: the file has been truncated since it was opened.
        """
        view, out = torch.atleast_1d(view), torch.atleast_1d(out)
        if view.is_contiguous() and out.is_contiguous() and self._mapped_addresses[1]:
            self._read(view, out)
            return
        rows = max(1, _BLOCK // max(1, view.stride(0) * view.itemsize))
        for source, target in zip(view.split(rows), out.split(rows), strict=True):
            target.copy_(source)
            self.release_pages(source)

    def _read(self, view: Tensor, out: Tensor) -> None:
        """Read a contiguous view without the mapping, since page faults would take as long as the copy."""
        offset = view.data_ptr() - self._mapped_addresses[0]
        buffer = out.flatten().view(torch.uint8).numpy().data
        while buffer:
            count = os.preadv(self.fd, [buffer], offset)
            if not count:
                raise CheckpointError(f"{self.path} had {self.size} bytes when it was opened, and ends at {offset} now")
            buffer, offset = buffer[count:], offset + count

    def release_pages(self, block: Tensor | None = None) -> None:
        """Release the pages of a block of a view, or of the entire file."""
        first, end = self._mapped_addresses
        if block is not None:
            start = block.data_ptr()
            extent = sum((size - 1) * stride for size, stride in zip(block.shape, block.stride(), strict=True)) + 1
            first, end = max(first, start - start % mmap.PAGESIZE), min(end, start + extent * block.itemsize)
        if first < end:
            _libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), mmap.MADV_DONTNEED)

    @locked_property
    def _mapped_addresses(self) -> tuple[int, int]:
        """Start and end address of the mapping; ``(0, 0)`` if the file is not mapped.

        The mapping is identified by the address of a view and the inode of the file, since a release of other memory
        would erase it.
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


def _plain(name: Any, tensor: Tensor) -> Tensor:
    """Return a tensor of a ``.bin`` file. Raise ``TypeError`` for invalid entries."""
    if not isinstance(name, str):
        raise TypeError(f"the entry {name!r:.80} has no name but a {type(name).__name__}")
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_neg():
        flags = {"meta": tensor.is_meta, "quantized": tensor.is_quantized, "negated": tensor.is_neg()}
        kind = next((name for name, is_set in flags.items() if is_set), f"{tensor.layout} {tensor.dtype}")
        raise TypeError(f"the entry {name!r:.80} is a {kind} tensor, and not one of plain numbers")
    if tensor.numel() * tensor.itemsize > tensor.untyped_storage().nbytes():
        shape = tuple(tensor.shape)
        raise TypeError(f"the entry {name!r:.80} has the shape {shape}, and the file has fewer numbers than that")
    return tensor.detach()
