"""All-reduces small tensors over the GPUs of one host through symmetric memory, for decoding steps.

Each rank writes its input to memory that all ranks can read, and sums all inputs itself. This takes one kernel and one
exchange; NCCL's ring has one step per rank. The kernel is torch's ``symm_mem::one_shot_all_reduce_copy``. It waits
until all ranks have written before it reads, and until all have read before it ends. The next sum may therefore reuse
the buffer.

`connect` gives an axis such a buffer. `collectives.all_reduce` then uses it in compiled code.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import all_reduce, axis_handle
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, gather_objects

BYTES = 128 * 1024
"""Largest tensor, as in Inductor. Beyond it, reading all inputs takes longer than NCCL's additional steps."""
_ALIGNMENT = 16
_ROUNDS = 8
_LONGEST_SOCKET_PATH = 107
_WITHOUT = "leave symmetric_memory out, so that NCCL computes all sums"


class SymmetricMemory:
    """Symmetric memory buffer of this rank, and sums over the ranks of a group through it.

    Two sums of a group must not run concurrently on two streams.

    Args:
        device: a GPU.

    Raises:
        RuntimeError: the path of the folder for temporary files is too long.

    Attributes:
        dtypes: the supported dtypes.
        axis: the handle of its axis in custom operations.
    """

    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)

    def __init__(self, device: torch.device) -> None:
        from torch.distributed import _symmetric_memory

        _check_socket_path()
        self._buffer = _symmetric_memory.empty(BYTES, dtype=torch.uint8, device=device)
        self._group, self.axis = "", 0

    def connect(self, axis: Axis) -> None:
        """Exchange addresses with the other ranks of the axis. Every rank calls this."""
        from torch.distributed import _symmetric_memory

        assert axis.group is not None
        self._handle = _symmetric_memory.rendezvous(self._buffer, axis.group)
        self._group, self.axis = axis.group.group_name, axis_handle(axis)

    def takes(self, x: Tensor) -> bool:
        """Return whether to sum ``x`` here instead of through NCCL. The result is the same on all ranks."""
        size = x.numel() * x.element_size()
        return x.dtype in self.dtypes and 0 < size <= BYTES and size % _ALIGNMENT == 0

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over the ranks in new memory.

        Args:
            x: a contiguous tensor accepted by `takes`.
        """
        if x.data_ptr() % _ALIGNMENT:  # the kernel requires the alignment of the buffer
            x = x.clone()
        part = self._buffer.view(x.dtype)[: x.numel()].view(x.shape)
        summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(part, x, "sum", self._group)
        return summed


def _check_socket_path() -> None:
    """Raise ``RuntimeError`` if the path for temporary files is too long for torch's sockets, which exchange addresses.

    torch copies the path into an array of 108 bytes without checking its length.
    """
    names = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in the order of torch's IpcChannel
    name = next((name for name in names if name in os.environ), "TMPDIR")
    folder = os.fsencode(os.environ.get(name, "/tmp"))
    most = _LONGEST_SOCKET_PATH - len("/symm_mem-") - len(str(1 << 22))  # the largest process id
    if len(folder) > most:
        raise RuntimeError(
            f"torch makes sockets in the folder of the variable {name}. Its path has {len(folder)} bytes and may "
            f"have {most}. Set {name} to a shorter path, such as /tmp, before the processes start"
        )


def connect(axis: Axis, device: torch.device, memory_type: Callable[[torch.device], Any] = SymmetricMemory) -> None:
    """Let compiled code sum small tensors over the axis through symmetric memory. Every rank calls this.

    A self-test first compares the sums with NCCL's on these GPUs, including replays from a CUDA graph.

    Args:
        device: the GPU of this rank.
        memory_type: creates a `SymmetricMemory` or a substitute.

    Raises:
        ValueError: symmetric memory is not available, or its sums are wrong. The axis keeps using NCCL.
    """
    if axis.size == 1 or axis.symmetric_memory is not None:
        return
    what = "symmetric_memory=True"
    with agree(axis, what):
        if axis.group is None or (memory_type is SymmetricMemory and device.type != "cuda"):
            where = "threads" if axis.group is None else f"processes on {device}"
            raise ValueError(f"{what} is for processes that have a GPU each, and the ranks are {where}: {_WITHOUT}")
    hosts = gather_objects(axis, socket.gethostname())
    if len(set(hosts)) > 1:
        raise ValueError(f"{what} is for GPUs of one host, and the ranks are on {sorted(set(hosts))}: {_WITHOUT}")
    with agree(axis, what), _explained(what):
        memory = memory_type(device)
    with agree(axis, what), _explained(what):
        memory.connect(axis)
    found = _sums_that_are_wrong(axis, memory, device)
    with agree(axis, what):
        if found:
            raise ValueError(f"{what} gives wrong sums here, of {found} values: {_WITHOUT}")
    object.__setattr__(axis, "symmetric_memory", memory)


def disconnect(axis: Axis) -> None:
    """Return to NCCL for all sums over the axis."""
    object.__setattr__(axis, "symmetric_memory", None)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Convert errors of torch's symmetric memory to a ``ValueError`` with a remedy."""
    try:
        yield
    except (RuntimeError, ImportError, AttributeError) as error:
        raise ValueError(f"{what} cannot be used here: {error}; {_WITHOUT}") from error


def _sums_that_are_wrong(axis: Axis, memory: Any, device: torch.device) -> list[int]:
    """Return the tensor sizes with sums unequal to the process group's. Inputs are small integers, so sums are exact.

    A rank that reads too early would see an older input. Several rounds with different start times of the ranks detect
    this.
    """
    alike = [(n, dtype) for dtype in memory.dtypes for n in (_ALIGNMENT, 1000 * _ALIGNMENT, BYTES // dtype.itemsize)]
    parts = [torch.zeros(n, dtype=dtype, device=device) for n, dtype in alike]
    replay, sums = _replayed(lambda: [memory.sum(part) for part in parts], device)
    wrong = set()
    generator = torch.Generator().manual_seed(axis.rank)
    for number in range(_ROUNDS):
        for part in parts:
            part.copy_(torch.randint(-8, 9, part.shape, generator=generator))
        expected = [part.clone() for part in parts]
        for each in expected:
            all_reduce(axis, each)
        if number % axis.size == axis.rank and device.type == "cuda":
            torch.cuda.synchronize(device)
        sums = replay() or sums
        wrong |= {part.numel() for part, a, b in zip(parts, sums, expected, strict=True) if not torch.equal(a, b)}
    return sorted(wrong)


def _replayed(compute: Callable[[], list[Tensor]], device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """Return a CUDA graph replay of ``compute`` and its output tensors; on other devices, the function itself."""
    if device.type != "cuda":
        return compute, []
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        compute()  # allocations and kernel loads, forbidden during capture
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = compute()
    return graph.replay, sums
