"""Shared memory through which the ranks of a process group on one host exchange objects.

Ranks connect to it during their first exchanges. An exchange over the store and gloo takes more than a millisecond of
each rank's core, mostly in threads that wake each other. The construction of a model needs about ten exchanges.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_kernels.build import BuildError
from oslo_kernels.shared_memory import SharedMemory
from oslo_models.distributed.mesh import Axis

_FIRST = 8192
"""Bytes per rank in the first exchange, including the length field. Longer objects need a second exchange."""
_LENGTH = 8
"""Bytes of the length field."""


class MemoryOfObjects:
    """State of the shared memory of a process group, as known to this rank.

    The first two objects that the ranks exchange by other means also connect them. The first carries the address of the
    memory, the second whether each rank could attach it. All ranks make the same exchanges, so all learn the result
    simultaneously.

    Attributes:
        memory: the memory for further objects; ``None`` until the ranks are connected, and if they cannot share memory.
    """

    def __init__(self, axis: Axis) -> None:
        self.memory: SharedMemory | None = None
        self._rank, self._size = axis.rank, axis.size
        self._attached: SharedMemory | None = None
        self._is_attached = False  # whether the exchange with the address is over
        # The memory needs a compiler. Do not require one of ranks with GPUs.
        self._is_settled = axis.watchdog is None or "nccl" in dist.get_backend_config(axis.group)

    def message(self) -> str | bool | None:
        """Return the connection message to send with the next object."""
        if self._is_settled:
            return None
        if self._is_attached:
            return self._attached is not None
        if self._rank > 0:
            return None
        with suppress(BuildError, OSError):
            self._attached, address = SharedMemory.create(self._size)
            return address
        return None

    def receive(self, messages: Sequence[str | bool | None]) -> None:
        """Process the connection messages of all ranks."""
        if self._is_settled:
            return
        if self._is_attached:
            self.memory, self._is_settled = self._attached if all(messages) else None, True
            self._attached = None
            return
        self._is_attached = True
        if self._rank > 0 and isinstance(messages[0], str):
            with suppress(BuildError, OSError):  # such as on another host
                self._attached = SharedMemory.attach(messages[0], self._rank, self._size)


def gather_bytes(memory: SharedMemory, data: Tensor, check: Callable[[], object]) -> list[Tensor]:
    """Gather the bytes of all ranks.

    Args:
        check: called about ten times a second while waiting for ranks.
    """
    first = torch.zeros(_FIRST, dtype=torch.uint8)
    first[:_LENGTH].view(torch.int64).fill_(len(data))
    start = data[: _FIRST - _LENGTH]
    first[_LENGTH : _LENGTH + len(start)] = start
    parts = memory.all_gather(first, check)
    sizes = parts[:, :_LENGTH].contiguous().view(torch.int64).flatten().tolist()
    starts = parts[:, _LENGTH:]
    if (longest := max(sizes) - starts.shape[1]) > 0:
        rest = data[starts.shape[1] :]
        padded = torch.cat((rest, rest.new_zeros(longest - len(rest))))
        starts = torch.cat((starts, memory.all_gather(padded, check)), 1)
    return [part[:size] for part, size in zip(starts, sizes, strict=True)]


_memories: weakref.WeakKeyDictionary[dist.ProcessGroup, MemoryOfObjects] = weakref.WeakKeyDictionary()


def memory_of_objects(axis: Axis) -> MemoryOfObjects:
    """Return the state of the axis's process group. Axes with all ranks share the world's state, connected first."""
    has_all_ranks = axis.ranks == tuple(range(dist.get_world_size()))
    group = dist.group.WORLD if has_all_ranks else axis.group
    assert group is not None
    if group not in _memories:
        _memories[group] = MemoryOfObjects(axis)
    return _memories[group]
