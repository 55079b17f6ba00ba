"""Authenticates the other end of a connection, before any of its data is unpickled.

On one host, the kernel reports the user at the other end of a Unix socket. Between hosts, both ends prove that they
know a secret without sending it: challenge and response, keyed with the secret, in both directions.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import time
from contextlib import suppress

from oslo_models.keep_alive import keep_alive

LEAST = 16
"""Minimum characters of a secret. An attacker who records a handshake can try secrets against it offline."""
TIMEOUT = 10.0
"""Total seconds that the other end may take to authenticate itself."""
_SIZE = 32
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class HandshakeError(ConnectionError):
    """The other end of a connection could not be authenticated."""


def check_secret(name: str, secret: object) -> None:
    """Raise ``ValueError`` for an unusable secret. The message does not contain the secret."""
    if not isinstance(secret, str) or len(secret.strip()) < LEAST:
        what = f"{len(secret.strip())} characters" if isinstance(secret, str) else type(secret).__name__
        raise ValueError(
            f"{name} must be a string of at least {LEAST} characters, equal on all hosts, such as the output of "
            f"`openssl rand -hex 32`; got {what}"
        )


def parse_address(published: bytes, several: bool) -> str | tuple[str, int]:
    """Parse the address of the application as published in the launcher's store.

    Args:
        several: on several hosts. On one host only the name of a Unix socket is accepted.

    Raises:
        ConnectionError: it is no such address.
    """
    with suppress(ValueError):
        match json.loads(published):
            case [str(name)] if not several:
                return f"\0{name}"
            case [str(host), int(port)] if several:
                return host, port
    raise ConnectionError(
        f"the store of the launcher says {published[:80]!r} for the address of the application: another program writes "
        "there, or not all processes have the same deploy_secret, version of oslo_models and LOCAL_WORLD_SIZE"
    )


def connect(address: str | tuple[str, int], secret: str | None) -> socket.socket:
    """Connect to the application and authenticate, as its kind of address requires.

    Raises:
        ConnectionError: nothing listens there, or it is not the application.
    """
    made = socket.socket(socket.AF_UNIX) if isinstance(address, str) else None
    try:
        if made is not None:
            tune(made).connect(address)
            require_same_user(made)
        else:
            assert secret is not None and not isinstance(address, str)
            made = tune(socket.create_connection(address))
            dial(made, secret)
    except (OSError, ValueError, OverflowError) as error:  # the latter two for malformed addresses
        if made is not None:
            made.close()
        where = f"the socket {address[1:]} of this host" if isinstance(address, str) else ":".join(map(str, address))
        raise ConnectionError(
            f"the application is not at {where}, the address in the store of the launcher: {error}. Processes on "
            "several hosts need an equal deploy_secret=; if they have, another program writes to the store"
        ) from error
    return made


def tune(connection: socket.socket) -> socket.socket:
    """Send small messages without delay, and detect hosts that are gone."""
    connection.settimeout(None)  # overrides the application's default timeout
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keep_alive(connection)
    return connection


def require_same_user(connected: socket.socket) -> None:
    """Check that a process of the same user is at the other end of a Unix socket.

    Raises:
        HandshakeError: the process belongs to another user.
    """
    data = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    if uid != os.geteuid():
        raise HandshakeError(f"process {pid} of user {uid} is at the other end, not a process of user {os.geteuid()}")


def accept(connected: socket.socket, secret: str) -> None:
    """Authenticate to the connecting process, and require it to do the same.

    Raises:
        HandshakeError: it does not know the secret.
    """
    _handshake(connected, secret, connected.getsockname(), b"accepts", b"dials")


def dial(connected: socket.socket, secret: str) -> None:
    """The counterpart of `accept` at the connecting end."""
    _handshake(connected, secret, connected.getpeername(), b"dials", b"accepts")


def _handshake(connected: socket.socket, secret: str, address: tuple[str, int], own: bytes, other: bytes) -> None:
    """Exchange challenges, then responses. The connecting end responds first.

    A response depends on the role, so that it cannot be reflected to its sender. It also depends on the dialled
    address, so that a man in the middle at another address cannot relay it.
    """
    key = secret.strip().encode()
    deadline = time.monotonic() + TIMEOUT
    connected.settimeout(TIMEOUT)
    try:
        challenge = secrets.token_bytes(_SIZE)
        connected.sendall(challenge)
        other_challenge = _read(connected, deadline)
        dialled = f"{address[0]} {address[1]}".encode()
        nonces = (challenge, other_challenge) if own == b"accepts" else (other_challenge, challenge)

        def response(role: bytes) -> bytes:
            return hmac.digest(key, b"oslo_models.deploy %s %s %s%s" % (role, dialled, *nonces), "sha256")

        if own == b"dials":
            connected.sendall(response(own))
        if not hmac.compare_digest(_read(connected, deadline), response(other)):
            raise HandshakeError(f"the other end at {dialled.decode()} does not have this secret")
        if own == b"accepts":
            connected.sendall(response(own))
    except TimeoutError as error:
        raise HandshakeError(f"the other end did not authenticate within {TIMEOUT:g} s") from error
    finally:
        connected.settimeout(None)


def _read(connected: socket.socket, deadline: float) -> bytes:
    data = b""
    while len(data) < _SIZE:
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError
        connected.settimeout(left)
        if not (more := connected.recv(_SIZE - len(data))):
            raise HandshakeError("the other end closed the connection before it had proved itself")
        data += more
    return data
