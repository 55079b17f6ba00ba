"""Copies weights to a GPU through two buffers of page-locked memory, in turn.

The driver copies other memory through a small buffer of its own, and the host waits for it. From page-locked memory a
GPU copies by itself, while the host reads the next block of the file into the other buffer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.reader import LazySlice
from oslo_models.sharding.layout import Index

SIZE = 16 << 20
"""Bytes of a buffer."""
log = logging.getLogger(__name__)


class PinnedBuffer:
    """Page-locked memory that a GPU reads asynchronously."""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device, self._copied = device, torch.cuda.Event()
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def like(self, target: Tensor) -> Tensor:
        """Return memory with the shape and dtype of ``target``."""
        return self._memory[: target.nbytes].view(target.dtype).view(target.shape)

    def start_copy(self, target: Tensor) -> None:
        """Start to copy the memory to ``target`` on the current stream of the GPU."""
        with torch.cuda.device(self._device):
            target.copy_(self.like(target), non_blocking=True)
            self._copied.record()

    def wait(self) -> None:
        """Wait until the last copy has ended."""
        self._copied.synchronize()


class PinnedBuffers:
    """Two buffers for all tensors and threads of one rank. They bound the page-locked memory.

    Args:
        device: the GPU.
        size: bytes of a buffer.
        kind: type of the buffers.
    """

    def __init__(self, device: torch.device, size: int = SIZE, kind: Callable[..., Any] = PinnedBuffer) -> None:
        self.device, self._size = device, size
        self._free: SimpleQueue[Any] = SimpleQueue()
        for _ in range(2):
            self._free.put(kind(device, size))

    def read(self, part: LazySlice) -> Tensor:
        """Read a slice of a checkpoint into new memory of the GPU."""
        reader, name = part.reader, part.name
        if type(part) is not LazySlice or not reader.is_stored(name):
            return self.copy(part.read())  # computed in host memory
        out = torch.empty(part.shape, dtype=part.dtype, device=self.device)
        blocks = []
        for wanted, local in part.layout.shard_indices(part.rank):
            target = out[local]
            for index in blocks_of(target.shape, self._size // target.itemsize):
                region = _within(wanted, index)
                blocks.append((target[index], partial(reader.copy_region, name, region)))
        self._copy_blocks(blocks)
        return out

    def copy(self, source: Tensor) -> Tensor:
        """Copy a tensor of the host into new memory of the GPU."""
        out = torch.empty(source.shape, dtype=source.dtype, device=self.device)
        blocks = blocks_of(source.shape, self._size // source.itemsize)
        self._copy_blocks([(out[index], partial(_fill, source[index])) for index in blocks])
        return out

    def _copy_blocks(self, blocks: Sequence[tuple[Tensor, Callable[[Tensor], None]]]) -> None:
        """Fill a buffer for each block and copy it to its target. Return when the last copy has ended."""
        used = {}
        for target, fill in blocks:
            buffer = self._free.get()
            try:
                buffer.wait()
                fill(buffer.like(target))
                buffer.start_copy(target)
            finally:
                self._free.put(buffer)
            used[id(buffer)] = buffer
        for buffer in used.values():  # another stream may read the tensor next
            buffer.wait()


def _fill(source: Tensor, out: Tensor) -> None:
    out.copy_(source)


def _within(region: Index, block: Index) -> Index:
    """Translate an index within a region to an index of the full tensor."""
    return tuple(slice(a.start + b.start, a.start + b.stop) for a, b in zip(region, block, strict=True))


def blocks_of(shape: Sequence[int], limit: int) -> Iterator[Index]:
    """Divide a tensor into blocks of at most ``limit`` elements, contiguous if the tensor is."""
    whole = tuple(slice(0, size) for size in shape)
    row = math.prod(shape[1:])
    if not shape or shape[0] * row <= limit:
        yield whole
        return
    rows = max(1, limit // row)
    for start in range(0, shape[0], rows):
        first = slice(start, min(start + rows, shape[0]))
        for rest in [whole[1:]] if row <= limit else blocks_of(shape[1:], limit):
            yield (first, *rest)


def pinned_buffers(device: torch.device) -> PinnedBuffers | None:
    """Return buffers for a GPU. Return ``None`` for other devices, or if the host grants no page-locked memory."""
    if device.type != "cuda":
        return None
    try:
        return PinnedBuffers(device)
    except RuntimeError as error:  # torch has no own type for it
        log.warning("weights are copied to %s without page-locked memory, which takes longer: %s", device, error)
        return None
