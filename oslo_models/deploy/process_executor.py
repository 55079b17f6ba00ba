"""What starts workers and carries messages to and from them: the interface, and processes on this host."""

from __future__ import annotations

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol

from oslo_models.deploy.connection import WorkerConnection, watched
from oslo_models.deploy.messages import decode, encode

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class Executor(Protocol):
    """Workers, one for each rank. They live from its construction to `kill`, or until one of them ends by itself."""

    @property
    def pids(self) -> list[int]:
        """Their process ids, by rank."""

    @property
    def host(self) -> str:
        """The address at which the others reach rank 0."""

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        """Send to one worker, without waiting for it; one that has died is reported by `receive`."""

    def broadcast(self, data: bytes) -> None:
        """Send to all workers what `encode` has made."""

    def wait(self, timeout: float, awake: float = 0.0) -> None:
        """Wait for at most so many seconds until a worker has said something, or has died.

        Args:
            awake: seconds before that for which it does not sleep, if that hastens its end.

        Raises:
            OSError: `kill` was called.
        """

    def receive(self) -> Iterator[tuple[int, Any]]:
        """What workers have said, as ``(rank, message)``; a message of ``None`` says that the worker has died.

        Raises:
            OSError: `kill` was called.
        """

    def obituary(self, rank: int) -> str:
        """How a worker has ended."""

    def kill(self) -> None:
        """End all workers at once, stopped ones too, and wait for their end."""


class Process(Protocol):
    """As much of ``subprocess.Popen`` as `ProcessExecutor` needs."""

    pid: int
    returncode: int | Any

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> Any: ...


class ProcessExecutor:
    """Processes on this host, each at the other end of a pair of sockets.

    The workers need nothing of the application but that connection: its end, however it comes about, is theirs.
    """

    host = "127.0.0.1"

    def __init__(self, count: int) -> None:
        self.processes: list[Process] = []
        self._senders: list[_Sender] = []
        self._incoming, self._ready = select.poll(), list[tuple[int, int]]()
        self._ends: dict[int, tuple[int, WorkerConnection]] = {}
        try:
            for rank in range(count):
                process, line = self._start(rank)
                self.processes.append(process)
                self._senders.append(_Sender(line))
                self._incoming.register(line.fileno(), select.POLLIN)
                self._ends[line.fileno()] = rank, line
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> tuple[Process, WorkerConnection]:
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_worker(theirs, rank)
        return process, WorkerConnection(ours)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, rank: int, message: tuple[Any, ...]) -> None:
        self._senders[rank].send(encode(message))

    def broadcast(self, data: bytes) -> None:
        for sender in self._senders:
            sender.send(data)

    def wait(self, timeout: float, awake: float = 0.0) -> None:
        if not self._senders:
            raise OSError("the connections are closed")
        self._ready = (awake and watched(self._incoming, awake)) or self._incoming.poll(timeout * 1e3)

    def receive(self) -> Iterator[tuple[int, Any]]:
        if not self._senders:
            raise OSError("the connections are closed")
        ready, self._ready = self._ready, []
        for descriptor, _ in ready:
            rank, line = self._ends[descriptor]
            try:
                message = decode(line.recv_bytes())
            except (EOFError, OSError):
                message = None
            yield rank, message

    def obituary(self, rank: int) -> str:
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
    """Writes to a line without waiting for the other side, which may be stopped.

    What there is room for goes at once, the rest through a thread.
    """

    def __init__(self, line: WorkerConnection) -> None:
        self._line = line
        self._outbox: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._queued = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._write, daemon=True, name="oslo-deploy-send").start()

    def send(self, data: bytes) -> None:
        with self._lock:
            try:
                rest = data if self._queued else self._line.send_now(data)
            except OSError:  # of the end of the other side hears who receives
                return
            if rest:
                self._queued += 1
                self._outbox.put(rest)

    def _write(self) -> None:
        while (data := self._outbox.get()) is not None:
            with suppress(OSError):
                self._line.send_bytes(data) if isinstance(data, bytes) else self._line.send_rest(data)
            with self._lock:
                self._queued -= 1
        with self._lock:
            self._line.close()

    def close(self) -> None:
        with suppress(OSError):
            self._line.shutdown()  # wakes who reads or writes; closing is left to the thread that writes
        self._outbox.put(None)


def start_worker(theirs: socket.socket, local_rank: int, loopback: bool = True) -> subprocess.Popen[bytes]:
    """Start a worker on this host that has one end of a connection.

    Args:
        local_rank: which of the GPUs of this host it takes.
        loopback: all workers are on this host, so that no network has to be found for them.
    """
    environment = {key: value for key, value in os.environ.items() if not _is_of_launcher(key)}
    environment |= {"LOCAL_RANK": str(local_rank), "TOKENIZERS_PARALLELISM": "false"}
    if loopback:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", "oslo_models.deploy.worker", str(theirs.fileno())],
        env=environment,
        stdin=subprocess.DEVNULL,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C in a terminal is not for them
    )


def _is_of_launcher(variable: str) -> bool:
    return variable in _LAUNCHER or variable.startswith("TORCHELASTIC_")


StartExecutor = Callable[[int], Executor]
"""Makes an executor with so many workers."""
