"""`StoreClient`: a connection to the store of a process group, with a timeout for every request."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from oslo_models.distributed.directory_store import DirectoryStore


class StoreLostError(TimeoutError):
    """The process that hosts the store has ended, or has closed the connection."""


class StoreClient:
    """A separate connection to a store, since a `TCPStore` answers one request per connection at a time.

    The process that hosts the store may stop in the middle of an answer, so requests run in a thread that is started
    with the client: Python 3.12 starts no threads while it shuts down, when the last status is published. `close` ends
    the thread: if it returned from C++ while the interpreter is being finalized, it would abort the process
    (``terminate called without an active exception``).

    Attributes:
        lost: whether the connection is broken. It never recovers, and each further request would log a C++ stack trace.
    """

    def __init__(self, store: Any, prefix: str) -> None:
        port = _port(store)
        before = _connections(port)
        self.store: Any = PrefixStore(prefix, store if isinstance(_base(store), DirectoryStore) else store.clone())
        self._connections = _connections(port) - before
        self._requests: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._requests,), daemon=True, name="oslo-store")
        self._thread.start()
        weakref.finalize(self, self._requests.put, None).atexit = False
        self.lost = False

    def ask(self, request: Callable[[Any], Any], seconds: float = 2.0) -> Any:
        """Return what ``request(store)`` returns.

        Raises:
            StoreLostError: the connection is broken.
            TimeoutError: no answer in this time.
        """
        answer: list[Any] = []
        ended = threading.Event()

        def run() -> None:
            if ended.is_set():  # given up before its turn came
                return
            with suppress(Exception):  # such as a store in a file that was removed
                try:
                    answer.append(request(self.store))
                except dist.DistNetworkError:
                    self.lost = True
            ended.set()

        if not self.lost:
            self._requests.put(run)
            ended.wait(seconds)
            ended.set()
        if answer:
            return answer[0]
        if self.lost:
            raise StoreLostError("the connection to the store of the process group is broken")
        raise TimeoutError("the store of the process group does not answer")

    def close(self, *threads: threading.Thread) -> None:
        """End the thread, and ``threads`` that use the connection; shut it down if one waits for an answer."""
        self._requests.put(None)
        self._thread.join(0.2)
        waiting = [thread for thread in (self._thread, *threads) if thread.is_alive()]
        if not waiting:
            return
        for fd, link in self._connections:
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{fd}") == link:
                    with socket.socket(fileno=os.dup(fd)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 5.0
        for thread in waiting:
            thread.join(max(0.0, deadline - time.monotonic()))


def _serve(requests: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (run := requests.get()) is not None:
        run()
        del run  # it refers to the client, whose end ends this thread


def _base(store: Any) -> Any:
    """The store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _port(store: Any) -> int | None:
    """The port of the store's server; ``None`` if the store has no server."""
    store = _base(store)
    return store.port if isinstance(store, TCPStore) else None


def _connections(port: int | None) -> set[tuple[int, str]]:
    """The file descriptors of this process's connections to a port, each with its link in ``/proc`` (Linux only)."""
    found = set()
    with suppress(OSError):
        for name in os.listdir("/proc/self/fd") if port is not None else ():
            with suppress(OSError):
                link = os.readlink(f"/proc/self/fd/{name}")
                if link.startswith("socket:"):
                    with socket.socket(fileno=os.dup(int(name))) as connection:
                        peer = connection.getpeername()
                    if isinstance(peer, tuple) and peer[1] == port:
                        found.add((int(name), link))
    return found
