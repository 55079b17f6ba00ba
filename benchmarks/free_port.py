"""A port for processes that are about to be started."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LEAST = 10000
"""Ports below are those of services."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A port of the loopback address on which nobody listens, and which the system does not give to connections.

    Between now and the moment at which somebody listens there, the system would take a port of its own choice for
    another connection; or for one to that very port, which is then connected to itself.
    """
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 0
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", random.SystemRandom().randrange(LEAST, first) if first > LEAST else 0))
            except OSError:
                continue
            return int(listener.getsockname()[1])
