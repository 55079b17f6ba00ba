"""A port for processes that are about to be started."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LEAST = 10000
"""Lower ports belong to services."""
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """Return a free port of the loopback address outside the ephemeral range.

    The system could give an ephemeral port to another connection before the caller listens on it, or to a connection
    to this very port, which would then be connected to itself.
    """
    first = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 0
    while True:
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", random.SystemRandom().randrange(LEAST, first) if first > LEAST else 0))
            except OSError:
                continue
            return int(listener.getsockname()[1])
