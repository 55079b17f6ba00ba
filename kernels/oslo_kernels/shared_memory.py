"""All-reduce, reduce-scatter and all-gather between the CPU ranks of one host, through shared memory (Linux only).

gloo uses sockets and switches between threads, which takes hundreds of microseconds for the few kilobytes of a decoding
step; shared memory takes a few. Sums are formed in rank order, half precision in float32, so all ranks get the same
bits. The method follows DeepSpeed's shared-memory all-reduce for CPU inference (``csrc/cpu/comm/shm.cpp``):
double-buffered slots, one counter per rank, and waiting by spinning first.
"""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from oslo_kernels.build import load

DTYPES = {torch.float32: 2, torch.float64: 4, torch.bfloat16: 6, torch.float16: 8}
"""The supported dtypes and their codes in a call, which is ``bytes << 8 | code | maximum``."""
_SCATTERS = 16
"""Marks the call of a reduce-scatter."""
SLOT = 256 << 10
"""Bytes per exchange; longer tensors take several."""


class PeerError(RuntimeError):
    """A rank died, timed out, or made a different call than the others.

    Attributes:
        position: the index of the rank at fault among the ranks that share the memory.
    """

    def __init__(self, message: str, position: int = -1) -> None:
        super().__init__(message)
        self.position = position


class SharedMemory:
    """One rank's view of the shared memory. All ranks make the same calls in the same order, as with any collective.

    The memory has no name in a file system: rank 0 creates it, the others open it through ``/proc``, and it disappears
    with the last of these processes, however they end.

    Attributes:
        timeout: seconds to wait for another rank in one call.
        waiting: factory of a context manager. A call enters it when it has waited for others for a tenth of a second.
            The argument names the call: ``"a sum"``, ``"a reduce-scatter"`` or ``"a concatenation"``.
    """

    timeout: float = 1800.0
    waiting: Callable[[str], AbstractContextManager[object]] = nullcontext

    def __init__(self, fd: int, rank: int, size: int) -> None:
        """Map the memory behind ``fd`` and take ownership of it.

        Raises:
            OSError: it cannot be mapped.
        """
        self._library, self.rank, self.size = _library(), rank, size
        self._reduce = self._library.oslo_shm_all_reduce
        self._address = ctypes.cast(self._reduce, ctypes.c_void_p).value or 0
        handle = self._library.oslo_shm_open(fd, rank, size, SLOT)
        if not handle:
            raise OSError(f"rank {rank} of {size} cannot map the shared memory")
        self._handle: int | None = handle
        weakref.finalize(self, self._library.oslo_shm_close, handle)

    @staticmethod
    def create(size: int) -> tuple[SharedMemory, str]:
        """Create memory for ``size`` ranks. Return rank 0's view, and the address for the others to `attach` to.

        Raises:
            BuildError: there is no compiler.
            OSError: the system does not support it.
        """
        fd = _library().oslo_shm_create(size, SLOT)
        if fd < 0:
            raise OSError(-fd, os.strerror(-fd))
        status = os.fstat(fd)
        return SharedMemory(fd, 0, size), f"{os.getpid()}:{fd}:{status.st_dev}:{status.st_ino}"

    @staticmethod
    def attach(address: str, rank: int, size: int) -> SharedMemory:
        """Open memory that another process of this host has created.

        Raises:
            BuildError: there is no compiler.
            OSError: it is not on this host, or belongs to another user.
        """
        pid, number, device, inode = (int(part) for part in address.split(":"))
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (device, inode):
            os.close(fd)
            raise FileNotFoundError(
                f"process {pid} of this host is another process than the one with the shared memory"
            )
        return SharedMemory(fd, rank, size)

    def all_reduce(self, x: Tensor, maximum: bool = False) -> Tensor:
        """Sum ``x`` over the ranks, or take the maximum, in place. Return ``x``.

        Args:
            x: a contiguous CPU tensor of one of `DTYPES`; of the same shape on every rank.

        Raises:
            PeerError: another rank died, timed out, or made a different call.
        """
        # three arguments only: each costs 0.1 us, and twice that where ranks share a core
        handle, pointer, call = self._handle, x.data_ptr(), x.nbytes << 8 | DTYPES[x.dtype] | maximum
        if code := self._reduce(handle, pointer, call):
            self._continue(code, "a sum", self._reduce, (handle, pointer, call))
        return x

    def direct(self) -> tuple[int, int]:
        """Return the addresses of `all_reduce`'s C++ function and its memory for C++ callers. 0 after an error.

        The caller passes the function's return code to `resume`.
        """
        return self._address, self._handle or 0

    def resume(self, x: Tensor, code: int) -> None:
        """Complete a sum of ``x`` in place after the function has returned ``code`` to its C++ caller.

        Raises:
            PeerError: as `all_reduce`.
        """
        call = x.nbytes << 8 | DTYPES[x.dtype]
        self._continue(code, "a sum", self._reduce, (self._handle, x.data_ptr(), call))

    def reduce_scatter(self, x: Tensor, sizes: Sequence[int], out: Tensor) -> Tensor:
        """Sum ``x`` over the ranks, write this rank's part of the sum to ``out``, and return it.

        Args:
            x: a contiguous CPU tensor of one of `DTYPES`, ``[sum(sizes)]``.
            sizes: the number of elements for each rank.
            out: a contiguous tensor of ``sizes[rank]`` elements.

        Raises:
            PeerError: as `all_reduce`.
        """
        first = sum(sizes[: self.rank]) * x.itemsize
        call = x.nbytes << 8 | _SCATTERS | DTYPES[x.dtype]
        arguments = self._handle, x.data_ptr(), out.data_ptr(), call, first, first + out.nbytes
        if code := self._library.oslo_shm_reduce_scatter(*arguments):
            self._continue(code, "a reduce-scatter", self._library.oslo_shm_reduce_scatter, arguments)
        return out

    def all_gather(self, x: Tensor, check: Callable[[], object] | None = None) -> Tensor:
        """Gather ``x``, a contiguous CPU tensor of the same shape on every rank, into ``[size, *x.shape]``.

        Args:
            check: a function to call every tenth of a second while a rank is missing. It raises if the rank has failed.
                Without it, the rank must be alive and arrive within `timeout`.

        Raises:
            PeerError: as `all_reduce`.
        """
        out = torch.empty((self.size, *x.shape), dtype=x.dtype)
        arguments = self._handle, x.data_ptr(), out.data_ptr(), x.nbytes
        code = self._library.oslo_shm_all_gather(*arguments)
        if code:
            self._continue(code, "a concatenation", self._library.oslo_shm_all_gather, arguments, check)
        return out

    def _continue(
        self,
        code: int,
        what: str,
        function: ctypes._FuncPointer,
        arguments: tuple[object, ...],
        check: Callable[[], object] | None = None,
    ) -> None:
        """Repeat a call that waits for another rank until it is done. Python handles signals in between."""
        with self.waiting(what):
            since, handle = time.monotonic(), self._handle
            self._handle = (
                None  # after any exception, be it a signal handler's, ranks are out of sync: no further calls
            )
            if handle is None:
                raise PeerError("the shared memory is of no use after an error; start the ranks again", self.rank)
            while code:
                if code > 0 and check is not None:
                    check()
                elif fault := self._fault(code, handle, time.monotonic() - since):
                    position, did = fault
                    message = f"rank {position} of {self.size} {did}, while rank {self.rank} waited for it"
                    raise PeerError(message, position)
                code = function(*arguments)
            self._handle = handle

    def _fault(self, code: int, handle: int, waited: float) -> tuple[int, str] | None:
        """Return the rank at fault and its fault for the ``code`` that a call returned, or ``None`` to keep waiting."""
        if code < 0:
            return -1 - code, "calls another operation or has a tensor of another size or dtype"
        if not self._library.oslo_shm_alive(handle, code - 1):
            return code - 1, "has died or has dropped its model"
        return (code - 1, f"has not come in {self.timeout:g} s") if waited > self.timeout else None


def _library() -> ctypes.CDLL:
    library = load("shared_memory.cpp")
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.oslo_shm_create.argtypes = number, size
    library.oslo_shm_open.argtypes = number, number, number, size
    library.oslo_shm_open.restype = pointer
    library.oslo_shm_close.argtypes = (pointer,)
    library.oslo_shm_alive.argtypes = pointer, number
    library.oslo_shm_all_reduce.argtypes = pointer, pointer, size
    library.oslo_shm_reduce_scatter.argtypes = pointer, pointer, pointer, size, size, size
    library.oslo_shm_all_gather.argtypes = pointer, pointer, pointer, size
    return library
