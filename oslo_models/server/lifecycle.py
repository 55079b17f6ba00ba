"""Answers requests while the models load: probes get the state of the server, other requests get status 503."""

from __future__ import annotations

import json
from typing import Any

LIVE, READY = "/health/live", "/health/ready"
"""Paths for liveness and readiness probes, as in Kubernetes. They need no key, and accept any host name."""


class Lifecycle:
    """ASGI application in front of the main application. Also answers readiness probes while the server drains.

    Attributes:
        application: the main application; ``None`` until the models are loaded.
        draining: the server finishes running requests, then ends.
    """

    def __init__(self) -> None:
        self.application: Any = None
        self.draining = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        if self.application is not None and not (self.draining and scope["path"] == READY):
            await self.application(scope, receive, send)
            return
        answer: dict[str, Any] = {"status": "draining" if self.draining else "loading"}
        status = 503
        if scope["path"] == LIVE:
            status = 200
        elif scope["path"] != READY:
            message = "the server is loading its models"
            error = {"message": message, "type": "server_error", "param": None, "code": "service_unavailable"}
            answer = {"error": error}
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if status == 503:
            headers += [(b"retry-after", b"5"), (b"connection", b"close")]  # close: the request body is not read
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
