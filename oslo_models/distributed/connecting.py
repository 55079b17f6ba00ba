"""Connects the ranks of an axis for collectives on GPUs as soon as its process group exists.

NCCL makes a communicator in the first collective of a group, and one for each pair of ranks in their first message. It
waits for up to half an hour there, even if a rank has died. So all ranks first meet at the store, which names a failed
rank within the timeout of the axis. Then they connect at once.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from oslo_models.distributed.store_barrier import store_barrier
from oslo_models.distributed.watchdog import waiting


def is_lazy(device: torch.device) -> bool:
    """Return whether a process group connects in its first collective, as with NCCL."""
    return device.type == "cuda" and "nccl" in dist.get_backend_config()


def meet(world: Any, what: str) -> None:
    """Wait for all ranks at the store, for at most the timeout of the axis.

    Raises:
        RankFailedError: a rank died, was stopped, or did not arrive in time.
    """
    with waiting(world, what):
        store_barrier(world.watchdog, world, what, limit=0.0)


def connect(axis: Any, device: torch.device, messages: bool = False) -> None:
    """Run the first collective of an axis. Every rank of the axis calls this.

    Args:
        messages: neighbours on the axis also send each other a first message.
    """
    if axis.size <= 1:
        return
    what, x = f"the first collective ({axis.name})", torch.zeros(1, device=device)
    calls: list[Any] = [partial(dist.all_reduce, x, group=axis.group)]
    if messages and axis.rank > 0:
        calls.append(partial(dist.recv, x, axis.ranks[axis.rank - 1], group=axis.group))
    if messages and axis.rank < axis.size - 1:
        calls.append(partial(dist.send, x, axis.ranks[axis.rank + 1], group=axis.group))
    for call in calls:
        with waiting(axis, what):
            axis.watchdog.in_flight.queue(axis, what, device, call)
