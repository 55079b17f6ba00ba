"""Workers under a launcher such as torchrun: rank 0 is the application, the other processes start workers for it.

Every process of the launcher runs the same script. On ranks other than 0, the constructor does not return: it starts
workers on its host at the application's request, and exits when the application does. The workers may be on several
hosts. Each has a connection to the application, which uses them as `ProcessExecutor` does.

Anybody who can reach the launcher's store can write to it. So only the address of the application is read from it. Data
from that address is unpickled only after both ends have authenticated each other (see `handshake`).
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from oslo_models.deploy import handshake
from oslo_models.deploy.connection import WorkerConnection
from oslo_models.deploy.process_executor import LOOPBACK, Process, ProcessExecutor, start_worker

MOST_STRANGERS = 64
"""Maximum number of concurrent handshakes. Beyond it, the oldest connection is closed."""
ARRIVAL_TIMEOUT = 300.0
"""Seconds that the application waits for the other processes to reach their constructor."""
_START_TIMEOUT = 30.0
"""Seconds that another process may take to start a worker."""
_ANSWER_TIMEOUT = 1.0
"""Seconds that another process may take to answer other orders, beyond their duration. Calls wait meanwhile."""
_MAX_MESSAGE_BYTES = 1 << 16
"""Maximum bytes of an order or an answer."""


def is_launched() -> bool:
    """Return whether a launcher started this process as one of several with the same script."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def launched_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def launched_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def spans_hosts(secret: str | None) -> bool:
    """Return whether the processes of the launcher are on several hosts.

    Raises:
        ValueError: they are on several hosts, and no secret is given.
    """
    local, world = os.environ.get("LOCAL_WORLD_SIZE"), str(launched_size())
    if secret is None and local not in (None, world):
        raise ValueError(
            f"the launcher started {world} processes, {local} of them on this host: pass deploy_secret=, a string of "
            f"at least {handshake.LEAST} characters that is equal on all hosts and known to nobody else, such as "
            "Path('secret').read_text() after `openssl rand -hex 32 > secret`. Without it, anybody who reaches "
            "MASTER_ADDR:MASTER_PORT could run code in the workers"
        )
    return secret is not None and local != world


class TorchrunExecutor(ProcessExecutor):
    """One worker for each of the first processes of the launcher, started by them.

    Args:
        secret: known to the processes of the launcher and nobody else; required if they are on several hosts.
    """

    port = 0

    def __init__(self, count: int, secret: str | None = None) -> None:
        self._launcher = _launcher_processes(secret)
        self.host = self._launcher.host
        super().__init__(count)

    def _start(self, rank: int) -> tuple[Process, WorkerConnection]:
        if rank > 0:
            return self._launcher.start(rank)
        ours, theirs = socket.socketpair()
        with theirs:
            process = self._launcher.start_here(theirs)
        return process, WorkerConnection(ours)


class _LauncherProcesses:
    """The application's handle of the other processes of the launcher, shared by all of its deployed models."""

    def __init__(self, secret: str | None) -> None:
        self.secret = secret
        self.loopback = not spans_hosts(secret)
        self.host = LOOPBACK if self.loopback else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._prepare_handshakes()
        self._listener, address = self._listen()
        self._store = _store()
        self._store.set("application", json.dumps(address))
        self._lock = threading.Lock()
        self._orders: dict[int, Connection] = {}
        self._prepare_orders()
        missing = set(range(1, launched_size()))
        while missing:
            try:
                conn = Connection(self._accept(ARRIVAL_TIMEOUT).detach())
            except TimeoutError:
                raise TimeoutError(
                    f"the processes {sorted(missing)} of the launcher have not come to deploy a model within "
                    f"{ARRIVAL_TIMEOUT:g} s; every process has to run the same script"
                ) from None
            rank = _receive(conn)
            self._orders[rank] = conn
            missing.discard(rank)

    def _listen(self) -> tuple[socket.socket, list[Any]]:
        """Open the socket for the other processes. Return it with its address as published in the store."""
        if self.loopback:
            name = f"oslo-models-{secrets.token_hex(16)}"
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(f"\0{name}")  # an abstract address: no file to remove
            listener.listen()
            return listener, [name]
        try:
            listener = socket.create_server((self.host, 0))
        except OSError:  # no interface has the launcher's address of this host
            listener = socket.create_server(("", 0))
        return listener, [self.host, listener.getsockname()[1]]

    def _accept(self, timeout: float, *others: Connection) -> socket.socket:
        """Return a connection from another process of the launcher.

        Args:
            others: connections that end the wait when they close or have a message.

        Raises:
            TimeoutError: no process connected within ``timeout`` seconds.
            ConnectionError: one of ``others`` closed or has a message.
        """
        deadline = time.monotonic() + timeout
        while True:
            with suppress(queue.Empty):
                return self._authenticated.get_nowait()
            ready = wait([self._listener, self._woken, *others], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no other process connected within {timeout:g} s")
            if self._woken in ready:
                self._woken.recv(1)
            elif self._listener in ready:
                self._begin_handshake(self._listener.accept()[0])
            else:
                raise ConnectionError("the other process has not connected")

    def _prepare_handshakes(self) -> None:
        self._authenticated: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._strangers: list[socket.socket] = []
        self._woken, self._wake = socket.socketpair()

    def _begin_handshake(self, accepted: socket.socket) -> None:
        """Authenticate a connection in a thread, so that silent strangers do not block other connections."""
        if len(self._strangers) >= MOST_STRANGERS:
            with suppress(OSError):
                self._strangers.pop(0).shutdown(socket.SHUT_RDWR)  # its thread closes it
        self._strangers.append(accepted)
        threading.Thread(target=self._authenticate, args=(accepted,), daemon=True, name="oslo-deploy-accept").start()

    def _authenticate(self, accepted: socket.socket) -> None:
        try:
            if self.loopback:
                handshake.require_same_user(handshake.tune(accepted))
            else:
                assert self.secret is not None
                handshake.accept(handshake.tune(accepted), self.secret)
        except OSError:
            accepted.close()
        else:
            self._authenticated.put(accepted)
            self._wake.send(b"1")
        finally:
            with suppress(ValueError):  # removed already to make room
                self._strangers.remove(accepted)

    def start(self, rank: int) -> tuple[Process, WorkerConnection]:
        """Start a worker in another process of the launcher."""
        if rank not in self._orders:
            raise ValueError(f"{rank + 1} processes are needed, and the launcher started {launched_size()}")
        conn, accepted, pid = self._orders[rank], None, None
        with self._lock, suppress(EOFError, OSError):
            number = self._order(rank, "start")
            while accepted is None:
                try:
                    accepted = self._accept(_START_TIMEOUT, *([conn] if pid is None else []))
                except ConnectionError:
                    answered, value = self._receive_from(rank)
                    if answered == number:  # it has connected, and is being authenticated
                        if value is None:
                            raise
                        pid = value
            if pid is None:
                pid = self._answer(rank, number, _START_TIMEOUT)
        if accepted is None or pid is None:
            conn.close()  # the connection of a worker that starts late would be mistaken for another one
            if accepted is not None:
                accepted.close()
            raise ConnectionError(f"the process of rank {rank} that the launcher started has ended")
        return _RemoteProcess(self, rank, pid), WorkerConnection(accepted)

    def start_here(self, theirs: socket.socket) -> Process:
        """Start the worker of rank 0."""
        return start_worker(theirs, int(os.environ.get("LOCAL_RANK", "0")), self.loopback, self.secret)

    def ask(self, rank: int, *order: Any, seconds: float = 0.0) -> Any:
        """Send an order to another process and return its answer; ``None`` if the process has ended or stands still.

        Does not wait for a process that has not answered the order before.

        Args:
            seconds: the duration of the order.
        """
        with self._lock, suppress(EOFError, OSError):
            number = self._order(rank, *order)
            return self._answer(rank, number, 0.0 if rank in self._silent else seconds + _ANSWER_TIMEOUT)
        return None

    def _prepare_orders(self) -> None:
        self._numbers, self._silent = itertools.count(), set[int]()

    def _order(self, rank: int, *order: Any) -> int:
        """Send an order. Return its number, which the answer repeats."""
        number = next(self._numbers)
        _send(self._orders[rank], [number, *order])
        return number

    def _answer(self, rank: int, number: int, seconds: float) -> Any:
        """Return the answer to an order; ``None`` if it does not arrive in time. Drops late answers to other orders."""
        conn, deadline = self._orders[rank], time.monotonic() + seconds
        while conn.poll(max(0.0, deadline - time.monotonic())):
            answered, value = self._receive_from(rank)
            if answered == number:
                return value
        self._silent.add(rank)
        return None

    def _receive_from(self, rank: int) -> Any:
        self._silent.discard(rank)
        return _receive(self._orders[rank])


class _RemoteProcess:
    """A worker that another process of the launcher has started."""

    def __init__(self, others: _LauncherProcesses, rank: int, pid: int) -> None:
        self.pid = pid
        self.returncode: Any = None
        self._order = functools.partial(others.ask, rank)

    def kill(self) -> None:
        self._order("kill", self.pid)

    def wait(self, timeout: float | None = None) -> Any:
        seconds = None if timeout is None else min(timeout, _ANSWER_TIMEOUT)
        self.returncode = self._order("wait", self.pid, seconds, seconds=_START_TIMEOUT if seconds is None else seconds)
        return self.returncode


_creation_lock = threading.Lock()


def _launcher_processes(secret: str | None) -> _LauncherProcesses:
    with _creation_lock:
        if not (created := _created(os.getpid())):
            created.append(_LauncherProcesses(secret))
    (others,) = created
    if others.secret != secret:
        raise ValueError(
            "deploy_secret differs from the secret of the model deployed before, to which the other processes belong"
        )
    return others


@functools.cache
def _created(pid: int) -> list[_LauncherProcesses]:
    return []


def _store() -> Any:
    """The key-value store that the processes of the launcher share."""
    if dist.is_initialized():
        assert dist.group.WORLD is not None
        shared: Any = dist.group.WORLD.get_group_store()
        store = shared.clone()  # a connection that waits for an answer blocks its other users
    else:
        store, _, _ = next(rendezvous("env://"))
    # The prefix changes when the launcher restarts the processes, because its store keeps the old values.
    return PrefixStore(f"oslo_models.deploy {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def serve(secret: str | None = None) -> NoReturn:
    """Start workers for the application until it exits. Runs on all ranks of the launcher except rank 0.

    Raises:
        SystemExit: the application has exited.
        ValueError: the processes are on several hosts, and no secret is given.
        ConnectionError: the application is not at the address in the store.
    """
    with suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the application
    several = spans_hosts(secret)
    store, rank = _store(), launched_rank()
    store.set_timeout(timedelta(days=365))
    address = handshake.parse_address(store.get("application"), several)
    orders = Connection(handshake.connect(address, secret).detach())
    _send(orders, rank)
    workers: dict[int, subprocess.Popen[bytes]] = {}

    def start(theirs: socket.socket) -> int | None:
        with theirs, suppress(OSError):
            process = start_worker(theirs, int(os.environ.get("LOCAL_RANK", rank)), not several, secret)
            workers[process.pid] = process
            return process.pid
        return None

    with suppress(EOFError, OSError):
        while True:
            number, order, *details = _receive(orders)
            if order == "start":
                answer: Any = start(handshake.connect(address, secret))
            elif order == "kill":
                workers[details[0]].kill()
                answer = True
            else:
                with suppress(subprocess.TimeoutExpired):
                    workers[details[0]].wait(details[1])
                answer = workers[details[0]].returncode
            _send(orders, [number, answer])
    for process in workers.values():
        process.kill()
        process.wait()
    raise SystemExit(0)


def _send(conn: Connection, value: Any) -> None:
    """Send a value as JSON."""
    conn.send_bytes(json.dumps(value).encode())


def _receive(conn: Connection) -> Any:
    try:
        return json.loads(conn.recv_bytes(_MAX_MESSAGE_BYTES))
    except ValueError as error:
        raise ConnectionError(f"the message is not JSON: {error}") from error
