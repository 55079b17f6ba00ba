"""Small Python objects exchanged between ranks, and the agreement that builds on it: on failures and on arguments.

The objects are pickled. Tensors go through `collectives`.

Whoever reaches the sockets of gloo could send a pickle that runs code. The ranks of a deployed model therefore have a
key (`authenticate_objects`), and nothing is unpickled that is not signed with it. Training relies on what torch relies
on: the network of a job is private.
"""

from __future__ import annotations

import hmac
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.memory_of_objects import gather_bytes, memory_of_objects
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.store_barrier import SLOW_TIMEOUT, SlowWait
from oslo_models.distributed.watchdog import waiting

_SIGNATURE_BYTES = 32
_keys: list[bytes] = []  # of this process, which is a rank of one job: the last one counts


class ForgedObjectError(RuntimeError):
    """An object that was received does not come from a rank of this job."""


def authenticate_objects(key: bytes) -> None:
    """Sign what this process sends to other ranks, and refuse what is not signed by them, from now on.

    Args:
        key: known to the ranks of this job only.
    """
    _keys.append(key)


def _signed(rank: int, value: Any) -> bytes:
    pickled = pickle.dumps(value)
    return _signature(rank, pickled) + pickled if _keys else pickled


def _verified(rank: int, data: bytes) -> Any:
    """Unpickle what ``rank`` has signed.

    Raises:
        ForgedObjectError: it has not.
    """
    if not _keys:
        return pickle.loads(data)
    signature, pickled = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(rank, pickled)):
        raise ForgedObjectError(
            f"an object that should come from rank {rank} was not signed by it: another program writes"
        )
    return pickle.loads(pickled)


def _signature(rank: int, pickled: bytes) -> bytes:
    return hmac.digest(_keys[-1], b"%d:" % rank + pickled, "sha256")


def gather_objects(axis: Axis, value: Any, slow: bool = True) -> list[Any]:
    """Gather one object from every rank of the axis, in the order of the axis. Values are pickled: keep them small.

    Args:
        slow: whether ranks may arrive at different times, because they load or save files: a rank that is alive is then
            waited for longer than the timeout of the axis. Pass ``False`` within a training step.
    """
    if axis.size == 1:
        return [value]
    if axis.threads is not None:
        return axis.threads.all_gather(axis.rank, value)
    objects = memory_of_objects(axis)
    pickled = _signed(axis.ranks[axis.rank], (value, objects.message()))
    data = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
    with waiting(axis, "an exchange", slow=slow and objects.memory is None):
        if objects.memory is None:
            parts = _gather_bytes(axis, data)
        else:
            parts = gather_bytes(objects.memory, data, _patience(axis, slow))
    received = [_verified(rank, part.numpy().tobytes()) for rank, part in zip(axis.ranks, parts, strict=True)]
    objects.receive([message for _, message in received])
    return [value for value, _ in received]


def _patience(axis: Axis, slow: bool) -> Callable[[], None]:
    """To be called while ranks have not come: raises once one of them has failed."""
    wait = SlowWait(axis.watchdog, axis, "an exchange", limit=SLOW_TIMEOUT if slow else 0.0)

    def check() -> None:
        wait.answered = time.monotonic()
        wait.check()

    return check


def _gather_bytes(axis: Axis, data: Tensor) -> list[Tensor]:
    """Gather the bytes of all ranks through the process group."""
    data = data if "cpu:" in dist.get_backend_config(axis.group) else data.cuda()
    sizes = torch.cat(_all_gather(axis, data.new_tensor([len(data)], dtype=torch.int64))).tolist()
    padded = torch.cat((data, data.new_zeros(max(sizes) - len(data))))
    return [part[:size].cpu() for part, size in zip(_all_gather(axis, padded), sizes, strict=True)]


def _all_gather(axis: Axis, x: Tensor) -> list[Tensor]:
    """All-gather within the timeout of the axis: the world's process group keeps torch's own, longer timeout."""
    parts = [torch.empty_like(x) for _ in axis.ranks]
    assert axis.group is not None
    axis.group.allgather(parts, x, timedelta(seconds=axis.timeout)).wait()
    return parts


def broadcast_object(axis: Axis, value: Any, src: int = 0, slow: bool = True) -> Any:
    """Return the object that position ``src`` on the axis passed. Values on other ranks are ignored."""
    return gather_objects(axis, value if axis.rank == src else None, slow)[src]


@contextmanager
def agree(axis: Axis, doing: str) -> Iterator[None]:
    """Run the block on every rank; if it raises on any rank, raise on all, so that no rank waits for one that gave up.

    The rank that failed raises its own exception; the others raise one of the same type that names the rank. The block
    must not contain a collective: a rank that raises before it would leave the others waiting in it.

    Args:
        doing: what the block does, for the message: ``"loading /path"``.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as exc:  # noqa: BLE001  every failure has to reach the peers
        error = exc
    reports = gather_objects(axis, None if error is None else (_constructible_type(type(error)), str(error)))
    if error is not None:
        raise error
    for rank, report in zip(axis.ranks, reports, strict=True):
        if report is not None:
            raise report[0](f"{doing}: rank {rank} failed: {report[1]}")


def _constructible_type(error_type: type[Exception]) -> type[Exception]:
    """The nearest ancestor of an exception type that every rank can construct from a message alone."""
    for ancestor in error_type.__mro__:
        try:
            if isinstance(ancestor("message"), Exception):
                return ancestor
        except TypeError:
            continue
    return RuntimeError


def require_equal(axis: Axis, values: Mapping[str, Any], what: str) -> None:
    """Raise ``ValueError`` on every rank, naming keys and values, unless all ranks passed equal values.

    Args:
        values: what has to be equal; compared by ``repr``.
        what: what the values are, for the message: ``"arguments of from_pretrained_with_parallel"``.
    """
    reprs_by_rank = gather_objects(axis, {key: repr(value) for key, value in values.items()})
    keys = {key: None for reprs in reprs_by_rank for key in reprs}
    lines = []
    for key in keys:
        seen = [reprs.get(key, "(not given)") for reprs in reprs_by_rank]
        if len(set(seen)) > 1:
            lines.append(f"{key}: " + ", ".join(f"rank {r} has {v}" for r, v in zip(axis.ranks, seen, strict=True)))
    if lines:
        raise ValueError(f"ranks were given different {what}:\n  " + "\n  ".join(lines))
