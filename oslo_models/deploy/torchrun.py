"""Workers under a launcher such as torchrun: rank 0 is the application, the other processes start workers for it.

Every process of the launcher runs the same script. In all but rank 0 the constructor does not return: it waits until
the application asks for a worker, starts it on its host, and ends when the application does. The workers of rank 0's
host and of all others have a connection to the application, so that models are served as by `ProcessExecutor`.
"""

from __future__ import annotations

import functools
import hmac
import os
import pickle
import secrets
import signal
import socket
import subprocess
import threading
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from oslo_models.deploy.executor import Process, ProcessExecutor, start_worker
from oslo_models.deploy.line import Line

ARRIVAL = 300.0
"""Seconds that the application waits for the other processes to reach their constructor."""
_PATIENCE = 30.0
"""Seconds that they may take to carry out an order."""
_KEY = 32


def is_launched() -> bool:
    """Whether this process is one of several that run the same script."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def launched_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


class TorchrunExecutor(ProcessExecutor):
    """One worker for each of the first processes of the launcher, started by them."""

    def __init__(self, count: int) -> None:
        self._others = _others()
        self.host = self._others.host
        super().__init__(count)

    def _start(self, rank: int) -> tuple[Process, Line]:
        if rank > 0:
            return self._others.start(rank)
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_worker(theirs, int(os.environ.get("LOCAL_RANK", "0")), self._others.loopback)
        return process, Line(ours)


class _Others:
    """The other processes of the launcher, as the application sees them; for all models that it deploys."""

    def __init__(self) -> None:
        self.loopback = os.environ.get("LOCAL_WORLD_SIZE") == str(launched_size())
        self.host = "127.0.0.1" if self.loopback else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._key = secrets.token_bytes(_KEY)
        try:
            self._listener = socket.create_server((self.host, 0))
        except OSError:  # the launcher knows this host by an address that it does not have itself
            self._listener = socket.create_server(("", 0))
        self._listener.settimeout(ARRIVAL)
        self._store = _store()
        port = self._listener.getsockname()[1]
        self._store.set("application", pickle.dumps((self.host, port, self._key, self.loopback)))
        self._lock = threading.Lock()
        self._orders: dict[int, Connection] = {}
        missing = set(range(1, launched_size()))
        while missing:
            try:
                conn = Connection(self._accept().detach())
            except TimeoutError:
                raise TimeoutError(
                    f"the processes {sorted(missing)} of the launcher have not come to deploy a model within "
                    f"{ARRIVAL:g} s; every process has to run the same script"
                ) from None
            rank = conn.recv()
            self._orders[rank] = conn
            missing.discard(rank)

    def _accept(self) -> socket.socket:
        """A connection from a process that knows the key."""
        while True:
            accepted, _ = self._listener.accept()
            _tune(accepted).settimeout(10.0)
            shown = b""
            with suppress(OSError):
                while len(shown) < _KEY and (more := accepted.recv(_KEY - len(shown))):
                    shown += more
            if hmac.compare_digest(shown, self._key):
                accepted.settimeout(None)
                return accepted
            accepted.close()

    def start(self, rank: int) -> tuple[Process, Line]:
        """Have a worker started by another process."""
        if rank not in self._orders:
            raise ValueError(f"{rank + 1} processes are needed, and the launcher started {launched_size()}")
        with self._lock:
            pid = self._ask(rank, "start")
            if pid is None:
                raise ConnectionError(f"the process of rank {rank} that the launcher started has ended")
            return _Remote(self, rank, pid), Line(self._accept())

    def ask(self, rank: int, *order: Any) -> Any:
        with self._lock:
            return self._ask(rank, *order)

    def _ask(self, rank: int, *order: Any) -> Any:
        """The answer of another process to an order; ``None`` when it has ended."""
        conn = self._orders[rank]
        with suppress(EOFError, OSError):
            conn.send(order)
            if conn.poll(_PATIENCE):
                return conn.recv()
            conn.close()  # an answer that comes later would be taken for that to another order
        return None


class _Remote:
    """A worker that another process has started."""

    def __init__(self, others: _Others, rank: int, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None
        self._order = functools.partial(others.ask, rank)

    def kill(self) -> None:
        self._order("kill", self.pid)

    def wait(self, timeout: float | None = None) -> Any:
        self.returncode = self._order("wait", self.pid, timeout)
        return self.returncode


_making = threading.Lock()


def _others() -> _Others:
    with _making:
        return _made(os.getpid())


@functools.cache
def _made(pid: int) -> _Others:
    return _Others()


def _store() -> Any:
    """Where the processes of the launcher can leave each other messages."""
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        shared: Any = dist.group.WORLD.get_group_store()
        store = shared.clone()  # waiting for an answer, it is of no use to others
    else:
        store, _, _ = next(rendezvous("env://"))
    # The launcher keeps its store when it starts the processes again.
    return PrefixStore(f"oslo_models.deploy {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def serve() -> NoReturn:
    """Start workers for the application, in all processes but its own, until it ends.

    Raises:
        SystemExit: it has ended.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the application
    store, rank = _store(), launched_rank()
    store.set_timeout(timedelta(days=365))
    host, port, key, loopback = pickle.loads(store.get("application"))
    orders = Connection(_dial(host, port, key).detach())
    orders.send(rank)
    workers: dict[int, subprocess.Popen[bytes]] = {}

    def start(theirs: socket.socket) -> int | None:
        with theirs, suppress(OSError):
            process = start_worker(theirs, int(os.environ.get("LOCAL_RANK", rank)), loopback)
            workers[process.pid] = process
            return process.pid
        return None

    with suppress(EOFError, OSError):
        while True:
            order, *details = orders.recv()
            if order == "start":
                orders.send(start(_dial(host, port, key)))
            elif order == "kill":
                workers[details[0]].kill()
                orders.send(True)
            else:
                with suppress(subprocess.TimeoutExpired):
                    workers[details[0]].wait(details[1])
                orders.send(workers[details[0]].returncode)
    for process in workers.values():
        process.kill()
        process.wait()
    raise SystemExit(0)


def _dial(host: str, port: int, key: bytes) -> socket.socket:
    """Connect to the application."""
    made = _tune(socket.create_connection((host, port)))
    made.sendall(key)
    return made


def _tune(connection: socket.socket) -> socket.socket:
    """Small messages go at once, and a host that is gone is noticed."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection
