"""A connection between the application and a worker: whole messages over a socket."""

from __future__ import annotations

import socket

_HEAD = 8
_SMALL = 65536


class Line:
    """Each message goes behind its length. `multiprocessing`'s connections take twice as long for a small one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)  # whatever the application has made the default

    def fileno(self) -> int:
        """Its descriptor, -1 when it is closed."""
        return self._socket.fileno()

    def send_bytes(self, data: bytes) -> None:
        head = len(data).to_bytes(_HEAD, "little")
        if len(data) <= _SMALL:
            self._socket.sendall(head + data)
        else:
            self._socket.sendall(head)
            self._socket.sendall(data)

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
