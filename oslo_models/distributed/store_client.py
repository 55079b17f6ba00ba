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
    """Separate connection to a store, since a `TCPStore` answers one request per connection at a time.

    The host of the store may stop in the middle of an answer, so requests run in a thread. The client starts the thread
    early: the last status is published at shutdown, when Python 3.12 starts no threads. `close` ends the thread. If it
    returned from C++ during finalization of the interpreter, it would abort the process (``terminate called without an
    active exception``).

    Attributes:
        lost: whether the connection is broken. It never recovers. Each further request would log a C++ stack trace.
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
        """Return the result of ``request(store)``.

        Raises:
            StoreLostError: the connection is broken.
            TimeoutError: no answer within this time.
        """
        answer: list[Any] = []
        ended = threading.Event()

        def run() -> None:
            if ended.is_set():  # the caller has given up
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
        """End the thread and all ``threads`` on this connection. Shut it down if one waits for an answer."""
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
        del run  # it refers to the client, and the end of the client ends this thread


def _base(store: Any) -> Any:
    """Return the store behind all prefixes."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _port(store: Any) -> int | None:
    """Return the port of the store's server; ``None`` if the store has no server."""
    store = _base(store)
    return store.port if isinstance(store, TCPStore) else None


def _connections(port: int | None) -> set[tuple[int, str]]:
    """Return the file descriptors of this process's connections to a port, with their ``/proc`` links (Linux only)."""
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
