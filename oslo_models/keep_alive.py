"""Detects hosts that vanish without closing their TCP connections."""

from __future__ import annotations

import socket

_SECONDS = 120
"""Time until a connection to a vanished host is closed."""
_IDLE, _INTERVAL = 60, 15


def keep_alive(connection: socket.socket) -> None:
    """Close a TCP connection 120 s after its other host has vanished. Does nothing for other sockets."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _INTERVAL, "TCP_KEEPCNT": (_SECONDS - _IDLE) // _INTERVAL}
    options["TCP_USER_TIMEOUT"] = _SECONDS * 1000  # for data that the host has not confirmed
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
