"""Starts workers and exchanges messages with them: the interface, and the implementation with local processes."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from oslo_models.deploy.busy_polling import BusyPoll
from oslo_models.deploy.connection import WorkerConnection
from oslo_models.deploy.forking import fork_worker
from oslo_models.deploy.serialization import decode, encode
from oslo_models.deploy.worker_output import worker_output
from oslo_models.starting import import_path, python_module

_LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)


LOOPBACK = "127.0.0.1"
"""The address of rank 0 when all workers are on this host."""


SECRET_VARIABLE = "OSLO_MODELS_DEPLOY_SECRET"
"""The environment variable that passes the secret of a deployment from the parent process to a worker."""


class Executor(Protocol):
    """Workers, one per rank. The constructor starts them, and `kill` ends them."""

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank."""

    @property
    def host(self) -> str:
        """The address at which the other ranks reach rank 0."""

    @property
    def port(self) -> int:
        """The port at which rank 0 listens; 0 for a free port."""

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        """Send to one worker without waiting. `receive` reports a worker that has died."""

    def broadcast(self, data: bytes) -> None:
        """Send an encoded message to all workers."""

    def wait(self, timeout: float, spin: float = 0.0) -> None:
        """Wait for at most ``timeout`` seconds until a worker has sent something or has died.

        Args:
            spin: initial seconds of busy waiting, if the implementation benefits from it.

        Raises:
            OSError: `kill` was called.
        """

    def receive(self) -> Iterator[tuple[int, Any]]:
        """Yield the received messages as ``(rank, message)``. A ``None`` message means that the worker has died.

        Raises:
            OSError: `kill` was called.
        """

    def exit_reason(self, rank: int) -> str:
        """Return how a worker ended, for an error message."""

    def kill(self) -> None:
        """Kill all workers, including suspended ones, and wait until they have exited."""


class Process(Protocol):
    """The part of ``subprocess.Popen`` that `ProcessExecutor` needs."""

    pid: int
    returncode: int | Any

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class ProcessExecutor:
    """Processes on this host, each connected by a socket pair.

    A worker exits when its connection closes, so no worker outlives the application, even after a crash.

    Args:
        host, port: of the store at which the workers meet; port 0 for a free port.
    """

    def __init__(self, count: int, host: str = LOOPBACK, port: int = 0) -> None:
        self.host, self.port = host, port
        self.processes: list[Process] = []
        self._senders: list[_Sender] = []
        self._incoming, self._ready = select.poll(), list[tuple[int, int]]()
        self._busy_poll = BusyPoll(self._incoming)
        self._ends: dict[int, tuple[int, WorkerConnection]] = {}
        try:
            for rank in range(count):
                process, connection = self._start(rank)
                self.processes.append(process)
                self._senders.append(_Sender(connection))
                self._incoming.register(connection.fileno(), select.POLLIN)
                self._ends[connection.fileno()] = rank, connection
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> tuple[Process, WorkerConnection]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = fork_worker(theirs, worker_environment(rank)) or start_worker(theirs, rank)
        return process, WorkerConnection(ours)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._senders[rank].send(encode(message))

    def broadcast(self, data: bytes) -> None:
        for sender in self._senders:
            sender.send(data)

    def wait(self, timeout: float, spin: float = 0.0) -> None:
        if not self._senders:
            raise OSError("the connections are closed")
        self._ready = self._busy_poll.wait(spin) or self._incoming.poll(timeout * 1e3)

    def receive(self) -> Iterator[tuple[int, Any]]:
        if not self._senders:
            raise OSError("the connections are closed")
        ready, self._ready = self._ready, []
        for descriptor, _ in ready:
            rank, connection = self._ends[descriptor]
            try:
                message = decode(connection.recv_bytes())
            except (EOFError, OSError):
                message = None
            yield rank, message

    def exit_reason(self, rank: int) -> str:
        process = self.processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        code = process.returncode
        how = "closed its connection" if code is None else f"died with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"rank {rank} (pid {process.pid}) {how}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        while self._senders:
            self._senders.pop().close()


class _Sender:
    """Writes to a connection without waiting for the worker, which may be suspended.

    Sends as much as fits into the socket's buffer at once. A thread sends the rest.
    """

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._outbox: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._write, daemon=True, name="oslo-deploy-send").start()

    def send(self, data: bytes) -> None:
        with self._lock:
            try:
                rest = data if self._queued else self._connection.send_now(data)
            except OSError:  # the connection is closed, which `receive` reports
                return
            if rest:
                self._queued += 1
                self._outbox.put(rest)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            with suppress(OSError):
                self._connection.send_bytes(data) if isinstance(data, bytes) else self._connection.send_rest(data)
            with self._lock:
                self._queued -= 1
        with self._lock:
            self._connection.close()

    def close(self) -> None:
        with suppress(OSError):
            self._connection.shutdown()  # wakes the readers and writers; the writing thread closes it
        self._outbox.put(None)


def start_worker(
    theirs: socket.socket, local_rank: int, loopback: bool = True, secret: str | None = None
) -> subprocess.Popen[bytes]:
    """Start a worker on this host.

    Args:
        theirs: the worker's end of the connection.
        local_rank: the index of its GPU on this host.
        loopback: all workers are on this host, so gloo needs only the loopback interface.
        secret: of the deployment. It is passed in the environment, which only this user can read.
    """
    # An own descriptor is passed as None, because it may be closed.
    stdout, stderr = (None if descriptor in (1, 2) else descriptor for descriptor in worker_output())
    return subprocess.Popen(
        python_module("oslo_models.deploy.worker", str(theirs.fileno())),
        env=worker_environment(local_rank, loopback, secret),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C in a terminal is for the application only
    )


def worker_environment(local_rank: int, loopback: bool = True, secret: str | None = None) -> dict[str, str]:
    """Return the environment variables of a worker. See `start_worker` for the arguments."""
    environment = {key: value for key, value in os.environ.items() if not _is_launcher_variable(key)}
    environment |= {"LOCAL_RANK": str(local_rank), "TOKENIZERS_PARALLELISM": "false"}
    if secret is not None:
        environment[SECRET_VARIABLE] = secret
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONPATH"] = import_path()
    return environment


def _is_launcher_variable(variable: str) -> bool:
    return variable in _LAUNCHER_VARIABLES or variable.startswith("TORCHELASTIC_")


StartExecutor = Callable[[int], Executor]
"""Constructor of an executor from the number of workers."""
