"""A worker process of the pool: runs job after job, each in a fresh process group and from the same state."""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import queue
import random
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import connection
from typing import Any

WORN = b"worn"
"""Message of a worker after a job that left process groups behind: their threads would slow all later jobs."""
THREADS = 7
"""Maximum number of threads that a worker keeps between jobs."""


def serve(conn: connection.Connection, stack_file: str, error_file: str) -> None:
    """Run the jobs that arrive through ``conn``.

    Args:
        stack_file: receives the Python stack on SIGUSR1 and in a crash.
        error_file: receives C++ messages on standard error, such as the exception before an abort.
    """
    os.setpgid(0, 0)
    gc.enable()
    gc.freeze()  # the collections after jobs skip preloaded objects
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(conn, inbox), daemon=True).start()
    share_gloo_device()
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    with open(stack_file, "w") as stacks, open(error_file, "w") as errors:
        os.dup2(errors.fileno(), 2)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=False)
        faulthandler.enable(file=stacks, all_threads=True)  # an abort in C++ reports the Python stack
        while True:
            _work(conn, inbox)


def _receive(conn: connection.Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Forward messages of the parent. When the parent is gone, end this process and its children, busy or not."""
    while True:
        try:
            inbox.put(conn.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)


def _work(conn: connection.Connection, inbox: queue.SimpleQueue[bytes]) -> None:
    """Run one job, report its result, wait for the reports of all ranks, and clean up."""
    job, body = pickle.loads(inbox.get()), inbox.get()
    with _clean_slate(job):
        conn.send_bytes(_attempt(job, body))
        del body
        assert inbox.get() == b"release"
    conn.send_bytes(WORN if len(os.listdir("/proc/self/task")) > THREADS else b"")


def _attempt(job: Mapping[str, Any], body: bytes) -> bytes:
    """The pickled ``(result, exception, traceback)`` of a job."""
    try:
        _join_group(job)
        function, args = pickle.loads(body)
        return dumps((function(*args), None, ""))
    except BaseException as error:  # noqa: BLE001  an exit or a pytest.fail() is an outcome like any other
        text = traceback.format_exc()
        error.__traceback__ = error.__context__ = error.__cause__ = None
        try:
            message = dumps((None, error, text))
            pickle.loads(message)
            return message
        except Exception:  # noqa: BLE001  it holds what cannot travel
            return dumps((None, RuntimeError(f"{type(error).__name__}: {error}"), text))


def share_gloo_device() -> None:
    """Share one gloo device among all process groups of this process.

    torch makes a device for each group, with a thread that lives until the end of the job. Every model has three
    groups, and their devices take a thirtieth of the time of tests on pipeline stages.
    """
    from torch.distributed import distributed_c10d

    base: Any = distributed_c10d.ProcessGroupGloo  # type: ignore[attr-defined]
    device = base.create_device(interface=os.environ["GLOO_SOCKET_IFNAME"])

    class ProcessGroupGloo(base):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **others: bool) -> None:
            options = base._Options()
            options._devices, options._timeout = [device], timeout
            for name, value in others.items():  # such as enable_reconfigure, since torch 2.14
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[attr-defined]


def _join_group(job: Mapping[str, Any]) -> None:
    import torch.distributed as dist

    rank, world_size = job["rank"], job["world_size"]
    if job["port"] is None:
        store = dist.FileStore(job["store"], world_size)
        patience = timedelta(seconds=job["timeout"] + 30)  # the parent detects hangs
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=patience)
    else:
        launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
        os.environ.update({name: str(value) for name, value in launched.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))


@contextmanager
def _clean_slate(job: Mapping[str, Any]) -> Iterator[None]:
    """Start every job from the same state, and leave no process group behind."""
    import numpy
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.default_generator.manual_seed(0)  # ranks compute on the CPU; seeding other devices takes longer
    random.seed(0)
    numpy.random.seed(0)
    sys.path[:] = job["path"]
    os.chdir(job["folder"])
    with environment({}):
        yield
        if dist.is_initialized():
            with suppress(Exception):  # a peer may be gone already
                dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # only modules and caches remain; scanning them again takes up to a seventh of the time


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables, and restore the former environment afterwards."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


class _Pickler(pickle.Pickler):
    """Pickles tensors as bytes: torch's pickling keeps whole storages alive, and autograd state cannot be sent."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(obj, torch.Tensor):
            return NotImplemented
        parameter = isinstance(obj, torch.nn.Parameter)
        if obj.is_meta:
            return _tensor, (None, obj.dtype, tuple(obj.shape), parameter, obj.requires_grad)
        with torch._C.DisableTorchFunctionSubclass():  # a shard is sent as its local tensor
            flat = obj.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
            data = flat.view(torch.uint8).numpy().tobytes()
        return _tensor, (data, obj.dtype, tuple(obj.shape), parameter, obj.requires_grad)


def _tensor(data: bytes | None, dtype: Any, shape: tuple[int, ...], parameter: bool, requires_grad: bool) -> Any:
    import torch

    if data is None:
        plain = torch.empty(shape, dtype=dtype, device="meta")
    elif not data:
        plain = torch.empty(shape, dtype=dtype)
    else:
        plain = torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)
    return torch.nn.Parameter(plain, requires_grad) if parameter else plain


def dumps(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(value)
    return buffer.getvalue()
