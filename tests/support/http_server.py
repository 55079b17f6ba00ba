"""HTTP without a client, which could refuse malformed requests: raw sockets, and in-process application calls."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import torch
import uvicorn

from oslo_models.server.connections import ConnectionLimits, protocol

from support.waiting import LIMIT


class StubModel:
    """Stand-in for a deployed model: repeats one token, or calls a function of the test.

    Args:
        act: replaces `generate`.
        vocabulary: number of tokens.
    """

    def __init__(self, act: Any = None, vocabulary: int = 10**6, token: int = 5) -> None:
        sizes = {"max_position_embeddings": 512, "vocab_size": vocabulary, "is_encoder_decoder": False}
        self.config = SimpleNamespace(**sizes, model_type="stub", name_or_path="stub")
        self.config.get_text_config = lambda: self.config
        self.generation_config = SimpleNamespace(eos_token_id=0, pad_token_id=0, do_sample=False)
        self.token, self.calls = token, list[dict[str, Any]]()
        if act is not None:
            self.generate = act

    reused_prompt_tokens = drafted_tokens = accepted_tokens = 0

    def can_generate(self) -> bool:
        return True

    def health(self, timeout: float = 2.0) -> dict[str, Any]:
        return {"healthy": True, "reason": None, "ranks": []}

    def generate(self, input_ids: torch.Tensor, max_new_tokens: int, streamer: Any = None, **rest: Any) -> Any:
        self.calls.append({"max_new_tokens": max_new_tokens, **rest})
        if streamer is not None:
            streamer.put(input_ids)
            for _ in range(min(max_new_tokens, 50)):
                streamer.put(torch.tensor([self.token]))
            streamer.end()
        return torch.cat((input_ids, torch.full((1, min(max_new_tokens, 50)), self.token)), 1)


class LocalModel:
    """Like a deployed model, but computes in this process."""

    reused_prompt_tokens = drafted_tokens = accepted_tokens = 0

    def __init__(self, model: Any) -> None:
        self.model, self.config = model.eval(), model.config
        self.generation_config = getattr(model, "generation_config", None)
        self.config.name_or_path = "local"

    def can_generate(self) -> bool:
        return self.model.can_generate()

    def health(self, timeout: float) -> dict[str, Any]:
        return {"healthy": True}

    def __call__(self, **inputs: Any) -> Any:
        with torch.no_grad():
            return self.model(**inputs)

    def generate(
        self, seed: Any, cancellation: Any, streamer: Any, decoding: Any = None, tenant: int = 0, **options: Any
    ) -> Any:
        if seed is not None:
            torch.manual_seed(seed)
        if decoding is not None:
            options["custom_generate"] = decoding.method(streamer)
        return self.model.generate(**options, streamer=streamer)


@contextmanager
def listening(app: Any, limits: ConnectionLimits | None = None, **options: Any) -> Iterator[str]:
    """Run uvicorn in a thread; yield its address.

    Args:
        limits: limits of connections; `None`: uvicorn's default protocol without limits.
    """
    if limits is not None:
        options["http"] = protocol(limits)
    options.setdefault("timeout_graceful_shutdown", 5)  # a failed test must not wait for its clients forever
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", **options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def connect(url: str, data: bytes = b"") -> socket.socket:
    """Open a connection and send these bytes."""
    parts = urlsplit(url)
    connected = socket.create_connection((parts.hostname, parts.port), timeout=LIMIT)
    if data:
        connected.sendall(data)
    return connected


def post_bytes(path: str, body: bytes, *headers: str, length: int | None = None) -> bytes:
    """The bytes of a POST request. ``length`` replaces the true length of the body in its header."""
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def read_answer(connected: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read status, headers (lower-case names) and body of the answer; status 0 if the connection closes first."""
    data = b""
    while b"\r\n\r\n" not in data:
        try:
            more = connected.recv(65536)
        except ConnectionError:
            more = b""
        if not more:
            return 0, {}, data
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    first, *rest = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in rest)}
    while len(body) < int(headers.get("content-length", 0)) and (more := connected.recv(65536)):
        body += more
    return int(first.split()[1]), headers, body


async def call(
    app: Any, method: str, path: str, body: bytes = b"", headers: list[tuple[bytes, bytes]] | None = None
) -> tuple[int, dict[str, str], bytes]:
    """Call an ASGI application without sockets."""
    given = [(b"host", b"localhost"), (b"content-type", b"application/json")] if headers is None else headers
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1"}
    plain, _, query = path.partition("?")
    scope |= {"method": method, "path": plain, "raw_path": plain.encode(), "query_string": query.encode()}
    scope |= {"headers": given, "scheme": "http", "root_path": "", "client": ("127.0.0.1", 1), "server": None}
    sent: list[Any] = []
    bodies = iter([body])

    async def receive() -> Any:
        try:
            return {"type": "http.request", "body": next(bodies), "more_body": False}
        except StopIteration:
            await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], names, b"".join(message.get("body", b"") for message in sent[1:])


def post_json(app: Any, path: str, fields: Any) -> tuple[int, Any]:
    """Post a JSON body to an application in process: the status and the answer."""
    status, _, body = asyncio.run(call(app, "POST", path, json.dumps(fields).encode()))
    return status, json.loads(body)
