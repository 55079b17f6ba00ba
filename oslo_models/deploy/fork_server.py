"""A process that imports torch and transformers once, then forks the workers of this host.

Started as ``python -m oslo_models.deploy.fork_server FD MODULE...``, or a copy of the application (see `process_copy`).
It has one thread, has not initialised CUDA and holds no process group. So a forked worker equals a new process that has
imported the same modules. The server ends when the application closes the connection, or after `IDLE_SECONDS` without a
worker. The application then starts another one.

An order of the application is a length, with the file descriptors of the worker as ancillary data (see `DESCRIPTORS`),
followed by a `ForkOrder` as JSON. On the news socket, the server sends the worker's process id with a process file
descriptor (pidfd), and the wait status once the worker has ended.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import random
import select
import socket
import struct
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple, NoReturn

LENGTH = struct.Struct("Q")
NUMBER = struct.Struct("i")
DESCRIPTORS = ("connection", "news", "stdout", "stderr")
"""The descriptors of an order: the worker's end of its connection, the news socket, and the worker's output."""
WORKER = "oslo_models.deploy.worker"
"""The module that a forked worker runs. Imported by name, because a direct import would be circular."""
IDLE_SECONDS = 45.0
"""Time without workers after which the server ends, since it holds the memory of its imports."""
USABLE, UNUSABLE = b"1", b"0"
"""The first byte from the server: whether a forked worker is equivalent to a new process."""


class ForkOrder(NamedTuple):
    """State of the application at the time of the order, which the worker inherits."""

    environment: dict[str, str]
    directory: str


class ForkedWorker(NamedTuple):
    """A running forked process, and the socket for its news."""

    pid: int
    news: socket.socket


def serve(control: socket.socket) -> NoReturn:
    """Fork a worker for each order until the application closes its end, or sends none. Exit after the last worker."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # keep descriptors of orders out of the standard streams
        pass
    os.close(free)
    gc.freeze()  # a garbage collection in a worker would write to all shared pages, and so copy them
    control.sendall(USABLE if _is_usable() else UNUSABLE)
    workers: dict[int, ForkedWorker] = {}  # by process file descriptor
    incoming = select.poll()
    incoming.register(control, select.POLLIN)
    is_open = True
    while is_open or workers:
        events = incoming.poll(None if workers else IDLE_SECONDS * 1e3)
        is_open = is_open and bool(events)
        for descriptor, _ in events:
            if descriptor in workers:
                incoming.unregister(descriptor)
                _report_end(descriptor, workers.pop(descriptor))
            elif (order := _receive(control)) is None:
                is_open = False
                incoming.unregister(control)
            elif (process := _fork(*order, control, workers)) is not None:
                incoming.register(process, select.POLLIN)
    os._exit(0)  # skips exit handlers of the application and its modules


def _fork(
    order: ForkOrder, descriptors: list[int], control: socket.socket, workers: dict[int, ForkedWorker]
) -> int | None:
    """Fork a worker. Return its process file descriptor; ``None`` if the fork failed."""
    connection, news_descriptor, *output = descriptors
    news, process = socket.socket(fileno=news_descriptor), None
    try:
        pid = os.fork()
    except OSError as error:
        _send(news, -(error.errno or 1))
    else:
        if pid == 0:
            for end in (control, news, *(worker.news for worker in workers.values())):
                end.close()  # otherwise the peers would not see it close
            for other in workers:
                os.close(other)
            _become_worker(order, connection, *output)
        process = os.pidfd_open(pid)
        workers[process] = ForkedWorker(pid, news)
        _send(news, pid, process)
    for descriptor in (connection, *output):
        os.close(descriptor)
    return process


def _receive(control: socket.socket) -> tuple[ForkOrder, list[int]] | None:
    """Receive the next order and its descriptors; ``None`` at the end of the connection."""
    body = b""
    with suppress(ConnectionResetError):  # the peer closed it with unread data
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, len(DESCRIPTORS))
        left = LENGTH.unpack(head)[0] if head else 0
        while len(body) < left and (more := control.recv(left - len(body))):
            body += more
        if body and len(body) == left:
            return ForkOrder(*json.loads(body)), descriptors
    return None


def _report_end(process: int, worker: ForkedWorker) -> None:
    """Collect the wait status of an ended worker, so that it is no zombie, and send it to the application."""
    os.close(process)
    _, status = os.waitpid(worker.pid, 0)
    _send(worker.news, status)
    worker.news.close()


def _send(news: socket.socket, number: int, *descriptors: int) -> None:
    with suppress(OSError):  # the application does not wait for it any more
        socket.send_fds(news, [NUMBER.pack(number)], descriptors)


def _become_worker(order: ForkOrder, connection: int, stdout: int, stderr: int) -> NoReturn:
    """Initialise the forked process: session, output, working directory, environment, seeds. Then run the worker."""
    code = 1
    try:
        os.setsid()
        for number, descriptor in ((1, stdout), (2, stderr)):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(order.directory)
        os.environ.clear()
        os.environ.update(order.environment)
        _seed_anew()
        gc.enable()
        importlib.import_module(WORKER).work(connection)
        code = 0
    except BaseException:  # noqa: BLE001  as at the end of a new process
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):  # it is closed, the disk is full, or it is None
                stream.flush()
        os._exit(code)


def _seed_anew() -> None:
    """Seed the random generators, so that workers draw different numbers, as new processes do."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _is_usable() -> bool:
    """Return whether a forked process can use CUDA and holds no locks of missing threads.

    Threads are counted after the fork, because fork-safe libraries such as OpenBLAS end their threads for it.
    """
    pid = os.fork()
    if pid == 0:
        cuda = sys.modules.get("torch.cuda")
        os._exit(int(cuda is not None and cuda._is_in_bad_fork() and _has_driver()))
    threads = len(os.listdir("/proc/self/task"))
    _, status = os.waitpid(pid, 0)
    return status == 0 and threads == 1


def _has_driver() -> bool:
    """Return whether there can be a GPU. CUDA builds of torch refuse GPUs in forks after counting, even if none exist.

    torch cannot answer this: a fork of a process that has initialised the driver counts no GPUs.
    """
    if sys.modules["torch"].version.hip is not None:
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@contextmanager
def _ending_with(control: socket.socket) -> Iterator[None]:
    """Context in which the kernel ends this process when the other end closes. The other end must not send data.

    A waiting thread is not possible, because this process must have only one thread.
    """
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)  # sends SIGIO, which ends a process by default
    if select.select([control], [], [], 0)[0]:
        os._exit(0)
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)


def import_modules(control: socket.socket, modules: Iterable[str]) -> None:
    """Import the modules of the workers. Exit if the application closes its end meanwhile."""
    gc.disable()  # imports leave little garbage, and collections take a tenth of their time
    with _ending_with(control):
        for name in modules:
            with suppress(Exception):  # the worker that needs it reports the failure
                importlib.import_module(name)


if __name__ == "__main__":
    connected = socket.socket(fileno=int(sys.argv[1]))
    import_modules(connected, sys.argv[2:])
    serve(connected)
