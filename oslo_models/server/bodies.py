"""Reads request bodies: small ones in the event loop, large ones in a thread, so that probes get answers meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from itertools import accumulate
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from oslo_models.server.errors import RequestError, invalid_fields

AT_ONCE = 1 << 16
"""Limit of bytes in a body for validation in the event loop. Below it, a thread switch would take longer."""
MOST_CONTAINERS = 1 << 15
"""Limit of lists and objects in a body. With more, Python's garbage collector would delay all threads."""
MOST_LEVELS = 100
"""Limit of nested lists and objects. Chat templates and schemas are processed by recursive functions."""
_BRACKETS, _LEVEL = re.compile(rb"[\[\]{}]"), {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
Body = TypeVar("Body", bound=BaseModel)


class Bodies:
    """Validates bodies of one application, one large one at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(1, "oslo-validate")

    def endpoint(self, kind: type[Body], answer: Callable[[Body], Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return the function of a route that answers bodies of this kind."""

        async def answer_body(request: Request) -> Any:
            return await answer(await self.read(kind, request))

        return answer_body

    async def read(self, kind: type[Body], request: Request) -> Body:
        """Return the body of a request.

        Raises:
            RequestError: the body is not JSON, or not of this kind.
        """
        data = await request.body()
        if not _is_json(request.headers.get("content-type", "")):
            raise RequestError(400, "the body is not declared as JSON; send the header Content-Type: application/json")
        if len(data) <= AT_ONCE:
            return _parse(kind, data)
        return await asyncio.get_running_loop().run_in_executor(self._threads, _parse, kind, data)


def _parse(kind: type[Body], data: bytes) -> Body:
    try:
        require_small(data)
    except ValueError as error:
        raise RequestError(400, f"the body {error}") from None
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        message = "the body is not JSON; send a JSON object with the header Content-Type: application/json"
        raise RequestError(400, message) from None
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        message, param = invalid_fields(error)
        raise RequestError(400, message, None, param) from None


def require_small(data: bytes) -> None:
    """Raise ``ValueError`` for JSON with too many lists and objects, or too many levels of them."""
    outside = b"".join(data.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')[::2])  # text outside strings
    if (count := outside.count(b"{") + outside.count(b"[")) > MOST_CONTAINERS:
        raise ValueError(f"has {count} lists and objects, more than {MOST_CONTAINERS}")
    if max(accumulate(_LEVEL[bracket] for bracket in _BRACKETS.findall(outside)), default=0) > MOST_LEVELS:
        raise ValueError(f"is nested in more than {MOST_LEVELS} levels")


def _is_json(content_type: str) -> bool:
    message = Message()
    message["content-type"] = content_type
    subtype = message.get_content_subtype()
    return message.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
