"""The outermost layer of the server: access checks, limits for size and time, request ids and the access log.

The guard checks requests before it reads their bodies, and reads the whole body before it calls the application.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from oslo_models.server import errors
from oslo_models.server.errors import RequestError, problem
from oslo_models.server.lifecycle import LIVE, READY

access_log = logging.getLogger("oslo_models.server.access")
log = logging.getLogger("oslo_models.server")

REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
"""Accepted request ids from clients. Other ids are replaced, because ids are written to logs."""
TENANT: ContextVar[int] = ContextVar("TENANT", default=0)
"""Number of the API key of the current request; 0 without a key. Prompts reuse prefixes of their own key only."""
PROBES = frozenset({LIVE, READY})
"""Paths allowed with any host name, because probes call the server by its address."""
OPEN_PATHS = PROBES | {"/health"}
"""Paths without an API key."""


class ApiKeys:
    """The accepted API keys. They can be replaced while the server runs.

    Raises:
        ValueError: the list is empty, or a key cannot be used.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self._salt = os.urandom(16)
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Accept these keys from now on. Raise like the constructor; the previous keys then stay."""
        for key in keys or [""]:
            require_sendable(key)
        self._keys = [key.encode() for key in keys]

    def include(self, given: str) -> bool:
        """Return whether this is an accepted key. Compares in constant time, to reveal no prefix of a key."""
        return sum(hmac.compare_digest(given.encode(), key) for key in self._keys) > 0

    def number(self, given: str) -> int:
        """Return a number for a key that stays the same when other keys are replaced, and does not reveal the key."""
        return int.from_bytes(hashlib.blake2b(given.encode(), digest_size=7, key=self._salt).digest(), "little")


@dataclass(frozen=True)
class Access:
    """Access rules and limits for requests.

    Attributes:
        api_keys: requests need one of these keys as ``Authorization: Bearer KEY``, except for `OPEN_PATHS`; ``None``
            for no keys.
        allowed_hosts: accepted values of the ``Host`` header, without ports; ``None`` for all.
        body_bytes: limit of bytes in a request body.
        body_seconds: time limit for receiving a body.
    """

    api_keys: ApiKeys | None = None
    allowed_hosts: Sequence[str] | None = None
    body_bytes: int = 1 << 20
    body_seconds: float = 30.0


def require_sendable(api_key: str | None) -> None:
    """Raise ``ValueError`` for a key that is empty or cannot be sent in a header. The message omits the key."""
    if api_key is not None and not (isinstance(api_key, str) and api_key.strip()):
        raise ValueError(
            "the API key is empty, which would open the server to everybody: pass a key (its file or variable may be "
            "empty or missing), or pass none for an open server"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ValueError("the API key has characters other than printable ASCII without spaces, such as a line's end")


class _ClientLeft(Exception):
    """The client closed its connection before it sent the whole body."""


class Guard:
    """ASGI middleware that checks requests and cancels them when their clients leave.

    Args:
        observe: called after each request with its route, status and seconds.
    """

    def __init__(self, app: Any, access: Access, observe: Callable[[str, int, float], object]) -> None:
        self.app, self.access, self._observe = app, access, observe
        self._hosts = None if access.allowed_hosts is None else {host.lower() for host in access.allowed_hosts}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        headers = {name.lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        given = headers.get(b"x-request-id", "")
        answer = _Answer(scope, send, given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        try:
            self._check(scope, headers)
            body = await self._read(receive)
            await _until_client_leaves(self.app(scope, _Replay(body), answer.send), receive)
        except _ClientLeft:
            answer.status = answer.status or 499  # as nginx logs it
        except asyncio.CancelledError:  # the server ends
            await answer.fail(RequestError(503, "the server is shutting down", "shutting_down"))
        except Exception as error:  # noqa: BLE001  every error gets an answer
            if not isinstance(error, RequestError):
                place = traceback.extract_tb(error.__traceback__)[-1]
                # Omit the text of the error: it may quote a prompt.
                log.error("%s: %s at %s:%s", answer.id, type(error).__name__, place.filename, place.lineno)
            await answer.fail(error)
        finally:
            route, seconds = _route(scope), time.monotonic() - answer.began
            self._observe(route, answer.status, seconds)
            client = (scope.get("client") or ("-",))[0]
            access_log.info("%s %s %s %s %s %.3f s", answer.id, client, scope["method"], route, answer.status, seconds)

    def _check(self, scope: Any, headers: dict[bytes, str]) -> None:
        """Raise for a request that the access rules forbid."""
        TENANT.set(0)
        host = re.sub(r":\d*$", "", headers.get(b"host", "")).strip("[]").lower()
        if self._hosts is not None and host not in self._hosts and scope["path"] not in PROBES:
            raise RequestError(400, "this server does not have this name; --allowed-hosts adds names", "host")
        if self.access.api_keys is None:
            if scope["path"] not in PROBES:
                self._check_origin(host, headers)
        else:
            scheme, _, key = headers.get(b"authorization", "").partition(" ")
            has_key = self.access.api_keys.include(key.strip()) and scheme.lower() == "bearer"
            scope.setdefault("state", {})["has_key"] = has_key
            if has_key:
                TENANT.set(self.access.api_keys.number(key.strip()))
            if not has_key and scope["path"] not in OPEN_PATHS:
                message = "a wrong API key, or none, in the header 'Authorization: Bearer KEY'"
                raise RequestError(401, message, headers={"WWW-Authenticate": "Bearer"})
        if b"content-length" in headers and b"transfer-encoding" in headers:
            # A proxy that trusts the other header would take a part of the body for a request of its own.
            message = "the request has a Content-Length and a Transfer-Encoding; send one"
            raise RequestError(400, message, headers={"Connection": "close"})
        length = headers.get(b"content-length", "0")
        if length.isdecimal() and int(length[:20]) > self.access.body_bytes:
            raise self._too_long()

    def _check_origin(self, host: str, headers: dict[bytes, str]) -> None:
        """Raise for a cross-site request: a foreign web page that uses the browser of an authorized user."""
        origin = headers.get(b"origin")
        if origin is None:
            foreign = headers.get(b"sec-fetch-site", "").lower() == "cross-site"
        else:
            name = re.sub(r":\d*$", "", origin.partition("://")[2]).strip("[]").lower()
            foreign = name not in ({host} if self._hosts is None else self._hosts)
        if foreign:
            message = (
                "pages of other sites may not use a server without a key; --allowed-hosts names the sites that may"
            )
            raise RequestError(403, message, "foreign_origin")

    def _too_long(self) -> RequestError:
        return RequestError(413, f"the request is longer than {self.access.body_bytes} bytes")

    async def _read(self, receive: Any) -> bytes:
        """Return the body.

        Raises:
            RequestError: the body is too long, or arrives too slowly.
        """
        try:
            return await asyncio.wait_for(self._read_all(receive), self.access.body_seconds)
        except asyncio.TimeoutError:
            message = f"the body did not arrive within {self.access.body_seconds:g} s"
            raise RequestError(408, message, "timeout", headers={"Connection": "close"}) from None

    async def _read_all(self, receive: Any) -> bytes:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _ClientLeft
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self.access.body_bytes:
                raise self._too_long()
        return bytes(body)


class _Replay:
    """Gives the application the body, then waits forever: `_until_client_leaves` notices when the client leaves."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> dict[str, Any]:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


async def _until_client_leaves(answering: Awaitable[None], receive: Any) -> None:
    """Run the application. Cancel it when the client closes its connection.

    Raises:
        _ClientLeft: the client closed its connection.
    """

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    answer, leaving = asyncio.ensure_future(answering), asyncio.ensure_future(left())
    try:
        await asyncio.wait((answer, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer
            raise _ClientLeft
        await answer
    finally:
        for task in (answer, leaving):
            task.cancel()


class _Answer:
    """The answer to one request, and its progress."""

    def __init__(self, scope: Any, send: Any, request_id: str) -> None:
        self.id, self.status, self.began = request_id, 0, time.monotonic()
        self._send = send
        scope.setdefault("state", {})["request_id"] = request_id

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            extra = [(b"x-request-id", self.id.encode()), (b"x-content-type-options", b"nosniff")]
            message = {**message, "headers": [*message.get("headers", ()), *extra]}
        await self._send(message)

    async def fail(self, error: BaseException) -> None:
        """Send an error. If the answer has begun, do nothing: the connection closes with an incomplete answer."""
        if self.status:
            return
        status, body = problem(error)
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        headers |= errors.headers(error)
        pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})
        await self._send({"type": "http.response.body", "body": data})


def _route(scope: Any) -> str:
    """Return the route of a request. Its path may contain a prompt, so logs use the route."""
    route = scope.get("route")
    return getattr(route, "path", None) or (scope["path"] if scope["path"] in OPEN_PATHS else "-")
