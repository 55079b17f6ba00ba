"""What the server says while it has no application: it answers the probes, and 503 to everything else."""

from __future__ import annotations

import json
from typing import Any

LIVE, READY = "/health/live", "/health/ready"
"""Paths for the liveness and readiness probes of Kubernetes and others; they need neither a key nor a host name."""


class Lifecycle:
    """ASGI application in front of another one, which is set once its models are loaded.

    Attributes:
        application: ``None`` while the models are loaded.
        draining: running requests are finished, and then the server ends.
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
            headers += [(b"retry-after", b"5"), (b"connection", b"close")]  # its body is not read
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})
