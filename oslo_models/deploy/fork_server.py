"""A process that has imported torch and transformers, and forks the workers of this host from that state.

Started as ``python -m oslo_models.deploy.fork_server FD MODULE...``, or a copy of the application (see `process_copy`).
It has one thread, has not initialised CUDA and holds no process group, so what it forks is like a process that has just
imported the same modules. It ends when the application closes the connection.

An order of the application is a length, with the file descriptors of the worker as ancillary data (see `DESCRIPTORS`),
and then an `Order` as JSON. On the socket for news the server sends the worker's process id with a descriptor that
stands for the process, and its wait status once it has ended.
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
"""What comes with an order: the worker's end of its connection, where to report on it, and its output."""
WORKER = "oslo_models.deploy.worker"
"""The module of what is forked; by its name, since what it imports leads to the application's side of this module."""
USABLE, UNUSABLE = b"1", b"0"
"""The first byte from the server: whether a process that it forks is as good as a new one."""


class Order(NamedTuple):
    """What a worker inherits from the application, as it is when the order is given."""

    environment: dict[str, str]
    directory: str


class Worker(NamedTuple):
    """A process that was forked and still runs, and where to report on it."""

    pid: int
    news: socket.socket


def serve(control: socket.socket) -> NoReturn:
    """Fork a worker for each order until the application closes its end; then end with the last of them."""
    while (free := os.open(os.devnull, os.O_RDWR)) <= 2:  # descriptors of orders are not to take their places
        pass
    os.close(free)
    gc.freeze()  # a collection in a worker would write to, and so copy, all pages that it shares with the others
    control.sendall(USABLE if _is_usable() else UNUSABLE)
    workers: dict[int, Worker] = {}  # by the descriptor that stands for the process
    incoming = select.poll()
    incoming.register(control, select.POLLIN)
    is_open = True
    while is_open or workers:
        for descriptor, _ in incoming.poll():
            if descriptor in workers:
                incoming.unregister(descriptor)
                _report_end(descriptor, workers.pop(descriptor))
            elif (order := _receive(control)) is None:
                is_open = False
                incoming.unregister(control)
            elif (process := _fork(*order, control, workers)) is not None:
                incoming.register(process, select.POLLIN)
    os._exit(0)  # without what the application or its modules registered for their exit


def _fork(order: Order, descriptors: list[int], control: socket.socket, workers: dict[int, Worker]) -> int | None:
    """Fork a worker; returns the descriptor that stands for it, ``None`` if that failed."""
    connection, news_descriptor, *output = descriptors
    news, process = socket.socket(fileno=news_descriptor), None
    try:
        pid = os.fork()
    except OSError as error:
        _send(news, -(error.errno or 1))
    else:
        if pid == 0:
            for end in (control, news, *(worker.news for worker in workers.values())):
                end.close()  # otherwise the others would not see that it is closed
            for other in workers:
                os.close(other)
            _become_worker(order, connection, *output)
        process = os.pidfd_open(pid)
        workers[process] = Worker(pid, news)
        _send(news, pid, process)
    for descriptor in (connection, *output):
        os.close(descriptor)
    return process


def _receive(control: socket.socket) -> tuple[Order, list[int]] | None:
    """The next order and its descriptors; ``None`` at the end of the connection."""
    body = b""
    with suppress(ConnectionResetError):  # it was closed before all that was sent there was read
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH.size, len(DESCRIPTORS))
        left = LENGTH.unpack(head)[0] if head else 0
        while len(body) < left and (more := control.recv(left - len(body))):
            body += more
        if body and len(body) == left:
            return Order(*json.loads(body)), descriptors
    return None


def _report_end(process: int, worker: Worker) -> None:
    """Take the status of a worker that has ended, so that it does not stay as a zombie, and pass it on."""
    os.close(process)
    _, status = os.waitpid(worker.pid, 0)
    _send(worker.news, status)
    worker.news.close()


def _send(news: socket.socket, number: int, *descriptors: int) -> None:
    with suppress(OSError):  # the application does not wait for it any more
        socket.send_fds(news, [NUMBER.pack(number)], descriptors)


def _become_worker(order: Order, connection: int, stdout: int, stderr: int) -> NoReturn:
    """Do in a forked process what a new one does."""
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
    """Other random numbers than those of the workers forked before, as in a new process."""
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def _is_usable() -> bool:
    """Whether a process forked from this one can use CUDA and holds no locks of threads that it does not have.

    Threads are counted after forking, as the libraries that can be forked end theirs for that (OpenBLAS does).
    """
    pid = os.fork()
    if pid == 0:
        cuda = sys.modules.get("torch.cuda")
        os._exit(int(cuda is not None and cuda._is_in_bad_fork() and _has_driver()))
    threads = len(os.listdir("/proc/self/task"))
    _, status = os.waitpid(pid, 0)
    return status == 0 and threads == 1


def _has_driver() -> bool:
    """Whether there can be a GPU. A torch for CUDA refuses GPUs in forks once it has counted them, even where none are.

    Asking torch is no way: a fork of a process that has initialised the driver counts none.
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
    """Have the kernel end this process when the other end is closed: for as long as nothing is sent to it.

    A thread that waits for that is no way: this process must have one only.
    """
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)  # sends SIGIO, which ends a process by default
    if select.select([control], [], [], 0)[0]:
        os._exit(0)
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)


def import_modules(control: socket.socket, modules: Iterable[str]) -> None:
    """Import what the workers need. Ends this process if the application closes its end meanwhile."""
    gc.disable()  # imports leave little garbage, and looking for it takes a tenth of their time
    with _ending_with(control):
        for name in modules:
            with suppress(Exception):  # the worker that needs it reports the failure
                importlib.import_module(name)


if __name__ == "__main__":
    connected = socket.socket(fileno=int(sys.argv[1]))
    import_modules(connected, sys.argv[2:])
    serve(connected)
