"""A connection between the application and a worker: whole messages over a socket."""

from __future__ import annotations

import os
import select
import socket
import time

from oslo_models.deploy.messages import rehearse

REHEARSAL = 3e-4
"""Seconds between two rehearsals of who watches."""
_HEAD = 8


class WorkerConnection:
    """Each message goes behind its length. `multiprocessing`'s connections take twice as long for a small one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)  # whatever the application has made the default
        self._incoming = select.poll()
        self._incoming.register(connected, select.POLLIN)

    def fileno(self) -> int:
        """Its descriptor, -1 when it is closed."""
        return self._socket.fileno()

    def send_bytes(self, data: bytes) -> None:
        if rest := self.send_now(data):
            self.send_rest(rest)

    def send_now(self, data: bytes) -> memoryview:
        """Send as much as there is room for, and return the rest: for `send_rest`, before any other message."""
        head = len(data).to_bytes(_HEAD, "little")
        try:
            sent = self._socket.sendmsg((head, data), (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        return memoryview(data)[sent - _HEAD :] if sent >= _HEAD else memoryview(head + data)[sent:]

    def send_rest(self, rest: memoryview) -> None:
        """Send what `send_now` has returned."""
        self._socket.sendall(rest)

    def watch(self, seconds: float) -> None:
        """Wait for at most so long until there is something to receive, without sleeping; see `watched`."""
        watched(self._incoming, seconds)

    def recv_bytes(self) -> bytes:
        """The next message.

        Raises:
            EOFError: the other end was closed.
        """
        return self._read(int.from_bytes(self._read(_HEAD), "little"))

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:  # once, if no signal comes
            if not (more := self._socket.recv(size - len(data), socket.MSG_WAITALL)):
                raise EOFError("the other end was closed")
            data += more
        return data

    def shutdown(self) -> None:
        """Wake who reads or writes, here and at the other end."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()


def spare_core(ranks: int) -> bool:
    """Whether there is a core to watch with beside those on which the ranks compute."""
    return len(os.sched_getaffinity(0)) > ranks


def watched(incoming: select.poll, seconds: float) -> list[tuple[int, int]]:
    """What `poll` returns as soon as something is there, or after so many seconds; meanwhile it does not sleep.

    It rehearses what is to be done then, as processors forget within a fraction of a millisecond.
    """
    until = again = time.monotonic()
    until += seconds
    while not (ready := incoming.poll(0)) and (now := time.monotonic()) < until:
        if now >= again:
            rehearse()
            again = now + REHEARSAL
    return ready
