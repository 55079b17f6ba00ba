"""Starts worker processes on this host, and carries messages to and from them."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import connection
from multiprocessing.connection import Connection
from typing import Any

_LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class ProcessExecutor:
    """One process for each rank, at the other end of a pair of sockets.

    The workers need nothing of the application but that connection: its end, however it comes about, is theirs.
    """

    def __init__(self, count: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.connections: list[Connection] = []
        try:
            for rank in range(count):
                self._start(rank)
        except BaseException:
            self.kill()
            raise

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if key not in _LAUNCHER}
        environment |= {"LOCAL_RANK": str(rank), "TOKENIZERS_PARALLELISM": "false"}
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        with ours, theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "oslo_models.deploy.worker", str(theirs.fileno())],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in a terminal is not for them
            )
            self.processes.append(process)
            self.connections.append(Connection(os.dup(ours.fileno())))

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes]

    def send(self, rank: int, message: object, number: int = 0) -> None:
        """Send to one worker; one that has died is reported by `receive`."""
        with suppress(OSError):
            self.connections[rank].send_bytes(encode(message, number))

    def broadcast(self, data: bytes) -> None:
        """Send to all workers what `encode` has made."""
        for conn in self.connections:
            with suppress(OSError):
                conn.send_bytes(data)

    def receive(self, timeout: float | None, silent: Sequence[int] = ()) -> Iterator[tuple[int, Any]]:
        """What workers have said, as ``(rank, message)``; a message of ``None`` says that the worker has died.

        Args:
            timeout: seconds to wait for the first.
            silent: ranks that are known to have died.
        """
        ranks = {conn: rank for rank, conn in enumerate(self.connections) if rank not in silent}
        for conn in connection.wait(list(ranks), timeout):
            assert isinstance(conn, Connection)
            try:
                yield ranks[conn], pickle.loads(conn.recv_bytes())
            except (EOFError, OSError):
                yield ranks[conn], None

    def obituary(self, rank: int) -> str:
        """How a worker has ended."""
        process = self.processes[rank]
        with suppress(subprocess.TimeoutExpired):
            process.wait(2.0)
        code = process.returncode
        how = "closed its connection" if code is None else f"died with exit code {code}"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        return f"rank {rank} (pid {process.pid}) {how}"

    def kill(self) -> None:
        """End all workers at once, stopped ones too, and wait for their end."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        self.hang_up()

    def hang_up(self) -> None:
        """Close the connections: workers that live end by themselves."""
        for conn in self.connections:
            conn.close()
        self.connections.clear()


def encode(message: object, number: int = 0) -> bytes:
    """A message as workers get it, with the number of the call in front, lest it can be read when the rest cannot."""
    return number.to_bytes(8, "little") + pickle.dumps(message)
