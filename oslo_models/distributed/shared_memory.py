"""Connects the ranks of an axis on one host through shared memory. It is faster than gloo."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from oslo_kernels.build import BuildError
from oslo_kernels.shared_memory import SharedMemory
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import broadcast_object, gather_objects
from oslo_models.distributed.watchdog import waiting


def shared_memory_of(axis: Axis) -> SharedMemory | None:
    """Return the shared memory of all ranks of the axis; ``None`` if not available. The first call creates it."""
    attributes = axis.__dict__  # `Axis` is frozen and has this attribute only after the first call
    if "memory" not in attributes:
        attributes["memory"] = _connect(axis)
    memory: SharedMemory | None = attributes["memory"]
    return memory


def _connect(axis: Axis) -> SharedMemory | None:
    """Create the memory on the first rank and attach the others; ``None`` on all ranks unless all succeed.

    The first collective of the axis connects the ranks, so they wait no longer than in a collective.
    """
    if axis.threads is not None:
        return None
    memory, address = None, None
    with _fall_back_to_gloo():
        if axis.rank == 0:
            memory, address = SharedMemory.create(axis.size)
    address = broadcast_object(axis, address, slow=False)
    with _fall_back_to_gloo():
        if axis.rank > 0 and address is not None:
            memory = SharedMemory.attach(address, axis.rank, axis.size)
    if not all(gather_objects(axis, memory is not None, slow=False)) or memory is None:
        return None
    memory.timeout = axis.timeout
    memory.waiting = partial(waiting, replace(axis))  # a copy, since the axis itself would form a reference cycle
    return memory


@contextmanager
def _fall_back_to_gloo() -> Iterator[None]:
    """Ignore errors due to ranks on several hosts, which is no fault. Warn of all other causes."""
    try:
        yield
    except (FileNotFoundError, PermissionError):  # no such process on this host, or it belongs to another user
        pass
    except (BuildError, OSError) as error:
        warnings.warn(f"ranks sum through gloo, which is slower than the memory they share: {error}", stacklevel=2)
