"""Exchanges small Python objects between ranks, and builds agreement on failures and arguments on top.

Objects are pickled. Tensors go through `collectives`.

Anyone with access to gloo's sockets could send a pickle that runs code. The ranks of a deployed model therefore share a
key (`authenticate_objects`) and unpickle only data signed with it. Training assumes a private network of the job, as
torch does.
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
_keys: list[bytes] = []  # keys of this process, a rank of one job; the last key is in use


class ForgedObjectError(RuntimeError):
    """A received object does not come from a rank of this job."""


def authenticate_objects(key: bytes) -> None:
    """From now on, sign all objects sent to other ranks and refuse received objects without a valid signature.

    Args:
        key: a secret of the ranks of this job.
    """
    _keys.append(key)


def _signed(rank: int, value: Any) -> bytes:
    pickled = pickle.dumps(value)
    return _signature(rank, pickled) + pickled if _keys else pickled


def _verified(rank: int, data: bytes) -> Any:
    """Verify the signature of ``rank`` and unpickle the object.

    Raises:
        ForgedObjectError: the signature is not valid.
    """
    if not _keys:
        return pickle.loads(data)
    signature, pickled = data[:_SIGNATURE_BYTES], data[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(signature, _signature(rank, pickled)):
        raise ForgedObjectError(
            f"an object that should come from rank {rank} was not signed by that rank: another program writes"
        )
    return pickle.loads(pickled)


def _signature(rank: int, pickled: bytes) -> bytes:
    return hmac.digest(_keys[-1], b"%d:" % rank + pickled, "sha256")


def gather_objects(axis: Axis, value: Any, slow: bool = True) -> list[Any]:
    """Gather one object from every rank of the axis, in axis order. Objects are pickled, so keep them small.

    Args:
        slow: whether ranks may arrive at different times because they load or save files. The wait for a rank that is
            alive may then exceed the timeout of the axis. Pass ``False`` within a training step.
    """
    if axis.size == 1:
        return [value]
    if axis.threads is not None:
        return axis.threads.all_gather(axis.rank, value)
    if _is_fake(axis):
        return [value] * axis.size
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
    """Return a function to call while waiting for ranks. It raises once one of them has failed."""
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
    """All-gather within the timeout of the axis. The default of the world's process group, from torch, is longer."""
    parts = [torch.empty_like(x) for _ in axis.ranks]
    assert axis.group is not None
    axis.group.allgather(parts, x, timedelta(seconds=axis.timeout)).wait()
    return parts


def broadcast_object(axis: Axis, value: Any, src: int = 0, slow: bool = True) -> Any:
    """Broadcast the object of position ``src`` on the axis. Values of other ranks are ignored."""
    return gather_objects(axis, value if axis.rank == src or _is_fake(axis) else None, slow)[src]


def _is_fake(axis: Axis) -> bool:
    """Return whether the other ranks do not exist. They would answer as this rank."""
    return axis.group is not None and dist.get_backend(axis.group) == "fake"


@contextmanager
def agree(axis: Axis, doing: str, slow: bool = True) -> Iterator[list[Any]]:
    """Run the block on every rank. If it raises on any rank, raise on all, so that no rank waits for a failed one.

    The failed rank re-raises its exception. The others raise an exception of the same type that names the failed rank.
    The block must not contain a collective: other ranks would wait in it for a rank that raised earlier.

    Args:
        doing: the operation of the block, for the message: ``"loading /path"``.
        slow: see `gather_objects`.

    Yields:
        A list for small objects of this rank. After the block, it has the list of every rank, in axis order.
    """
    error: Exception | None = None
    shared: list[Any] = []
    try:
        yield shared
    except Exception as exc:  # noqa: BLE001  every failure has to reach the peers
        error = exc
    report = None if error is None else (_constructible_type(type(error)), str(error))
    reports = gather_objects(axis, (report, [] if report else shared), slow)
    if error is not None:
        raise error
    for rank, (other, _) in zip(axis.ranks, reports, strict=True):
        if other is not None:
            raise other[0](f"{doing}: rank {rank} failed: {other[1]}")
    shared[:] = [theirs for _, theirs in reports]


def _constructible_type(error_type: type[Exception]) -> type[Exception]:
    """Return the nearest base of an exception type that every rank can construct from a message alone."""
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
        values: the values to compare, by ``repr``.
        what: a description of the values, for the message: ``"arguments of from_pretrained_with_parallel"``.
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
