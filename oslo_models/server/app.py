"""The ASGI application around a deployed model, and the command ``oslo-models serve``."""

from __future__ import annotations

import argparse
import hmac
import signal
import socket
from typing import Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import AutoConfig, AutoTokenizer

from oslo_models import auto
from oslo_models.deploy.errors import EngineError
from oslo_models.server.schema import problem
from oslo_models.server.service import Service

__all__ = ["Service", "application", "require_sendable", "run"]


async def _error_response(request: Request, error: Exception) -> Response:
    status, body = problem(error)
    return JSONResponse(body, status, getattr(error, "headers", None))


class _BodyLimit:
    """ASGI middleware that stops reading a request once its body is longer than ``limit`` bytes."""

    def __init__(self, app: Any, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.limit:
                raise HTTPException(413, f"the request is longer than {self.limit} bytes")
            return message

        await self.app(scope, counted, send)


def application(
    model: Any,
    tokenizer: Any,
    name: str | None = None,
    *,
    max_queue_size: int = 64,
    max_length: int | None = None,
    max_body_size: int = 1 << 20,
    api_key: str | None = None,
) -> FastAPI:
    """The ASGI application around a deployed model, for ``uvicorn`` and others; one process, which is the model's.

    Args:
        name: what clients call the model (default: its configuration's name).
        max_queue_size: calls that may run or wait; further requests are answered with status 429.
        max_length: tokens that a prompt and its answer may have together (default: the limit of the model).
        max_body_size: bytes of a request body; longer ones are answered with status 413.
        api_key: required of requests as ``Authorization: Bearer ...``, except for ``/health``.

    Raises:
        ValueError: the tokenizer cannot decode token by token; or ``api_key`` is empty or cannot be sent in a header.
    """
    require_sendable(api_key)

    async def check_key(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), (api_key or "").encode()):
            raise HTTPException(401, "a wrong API key, or none, in the header 'Authorization: Bearer KEY'")

    service = Service(model, tokenizer, name or model.config.name_or_path, max_length, max_queue_size)
    app = FastAPI(title="oslo-models", docs_url=None, redoc_url=None)
    app.add_middleware(_BodyLimit, limit=max_body_size)
    for kind in (StarletteHTTPException, RequestValidationError, ValueError, TemplateError, EngineError, Exception):
        app.add_exception_handler(kind, _error_response)
    app.add_api_route("/health", service.health, methods=["GET"])
    guards = [] if api_key is None else [Depends(check_key)]
    app.add_api_route("/generate_text/{text}", service.generate_text, methods=["GET"], dependencies=guards)
    app.add_api_route("/v1/models", service.models, methods=["GET"], dependencies=guards)
    app.add_api_route("/v1/completions", service.completions, methods=["POST"], dependencies=guards)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], dependencies=guards)
    return app


def require_sendable(api_key: str | None) -> None:
    """Raise ``ValueError`` for a key that is empty or that clients cannot send; the message does not contain it."""
    if api_key is not None and not (isinstance(api_key, str) and api_key.strip()):
        raise ValueError(
            "the API key is empty, so that everybody could use the server: pass a key (a file or variable that it is "
            "from may be empty or missing), or none at all for a server that is open on purpose"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ValueError("the API key has characters other than printable ASCII without spaces, such as a line's end")


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that are running then are still answered.

    Args:
        args: the options of ``oslo-models serve``.

    Raises:
        OSError: the port is taken, or there is no such model.
        ValueError: an option is invalid.
    """
    require_sendable(args.api_key)
    with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((args.host, args.port))  # before the model is loaded, so that an error shows at once
        tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
        encodes = AutoConfig.from_pretrained(args.model).is_encoder_decoder
        kind = auto.AutoModelForSeq2SeqLM if encodes else auto.AutoModelForCausalLM
        names = ("tensor_parallel_size", "pipeline_parallel_size", "max_batch_size", "batch_wait_ms", "dtype")
        options = {name: value for name in names if (value := getattr(args, name)) is not None}
        with kind.from_pretrained_with_parallel(args.model, deploy=True, **options) as model:
            if args.fuse:
                model.fuse()
            limits = ("max_queue_size", "max_length", "max_body_size", "api_key")
            app = application(model, tokenizer, args.model, **{name: getattr(args, name) for name in limits})
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            # uvicorn shuts down cleanly on SIGTERM and then raises it again, which would end the process as a failure
            signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
            listener.listen(2048)
            host, port = listener.getsockname()[:2]
            print(f"{args.model} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            server.run(sockets=[listener])
