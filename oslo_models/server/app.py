"""The ASGI application around deployed models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware

from oslo_models.deploy.errors import EngineError
from oslo_models.server.bodies import Bodies
from oslo_models.server.embeddings import EmbeddingRequest
from oslo_models.server.endpoints import Endpoints
from oslo_models.server.errors import headers, problem
from oslo_models.server.guard import Access, ApiKeys, Guard, require_sendable
from oslo_models.server.images import ImageLimits
from oslo_models.server.lifecycle import LIVE, READY
from oslo_models.server.media_chats import takes_media
from oslo_models.server.metrics import Metrics
from oslo_models.server.responses import ResponsesRequest
from oslo_models.server.schema import ChatRequest, CompletionRequest
from oslo_models.server.served_model import ServedModel
from oslo_models.server.service import Service
from oslo_models.server.sounds import SoundLimits
from oslo_models.server.tokens import DetokenizeRequest, TokenizeRequest
from oslo_models.server.transcriber import transcribes

__all__ = ["ApiKeys", "Service", "application", "require_sendable"]


async def _error_response(request: Request, error: Exception) -> Response:
    status, body = problem(error)
    return JSONResponse(body, status, headers(error))


def application(
    model: Any,
    tokenizer: Any,
    name: str | None = None,
    *,
    others: Sequence[tuple[Any, Any, str]] = (),
    max_queue_size: int = 64,
    max_length: int | None = None,
    max_body_size: int | None = None,
    max_images: int = ImageLimits.images,
    max_image_pixels: int = ImageLimits.pixels,
    max_sounds: int = SoundLimits.sounds,
    max_sound_seconds: float = SoundLimits.seconds,
    api_key: str | ApiKeys | None = None,
    allowed_hosts: Sequence[str] | None = None,
    allowed_origins: Sequence[str] = (),
    body_timeout: float = 30.0,
    pooling: str | None = None,
    normalize: bool = True,
    metrics: Metrics | None = None,
    adapters: Mapping[str, str] | None = None,
    batch_only: bool = False,
) -> FastAPI:
    """Return an ASGI application around deployed models, for ``uvicorn`` and others.

    Run it in one process, the process that deployed the models. The application limits requests. The surrounding server
    limits connections, as ``oslo-models serve`` does.

    Args:
        tokenizer: the tokenizer, or the processor of a model that reads images or sounds. With a processor, chats may
            have images as data URLs and sounds in base64, and models of speech transcribe files.
        name: the name of the model for clients (default: the name in its configuration).
        others: further models with their tokenizers and names.
        max_queue_size: limit of running and waiting calls; further requests get status 429.
        max_length: limit of tokens in a prompt and its answer together (default: the limit of the model).
        max_body_size: limit of bytes in a request body; longer bodies get status 413 (default: 1 MiB, or 20 MiB with
            a model of images or sounds).
        max_images: limit of images in a request.
        max_image_pixels: limit of pixels in an image.
        max_sounds: limit of sounds in a request.
        max_sound_seconds: limit of the length of all sounds in a request together.
        api_key: key that requests must send as ``Authorization: Bearer ...``, except to ``/health`` and its two probes.
            Pass `ApiKeys` for several keys, or to replace keys later.
        allowed_hosts: accepted values of the ``Host`` header, without ports (default: all).
        allowed_origins: origins of web pages that may call the server, such as ``https://chat.example`` (default:
            none); ``*`` for all.
        body_timeout: time limit in seconds for receiving a body.
        pooling: for ``/v1/embeddings`` with models without a task head: ``"mean"`` over all tokens, ``"cls"`` (the
            first), ``"last"`` or ``"max"`` (default: from the checkpoint's sentence-transformers files, or the mean).
        normalize: scale embedding vectors to length 1.
        metrics: the metrics to update (default: a new `Metrics`).
        adapters: the adapters loaded in ``model``: maps the names for clients to the names in the model. Requests use
            an adapter by its name in the ``model`` field. From now on, only the application may switch adapters.
        batch_only: refuse requests that cannot join the running batch, such as beams, with status 400. They would slow
            down the others.

    Raises:
        ValueError: ``api_key`` is empty or cannot be sent in a header; two models or adapters have the same name; or a
            checkpoint has a default that the server does not support.
    """
    if not isinstance(api_key, (ApiKeys, type(None))):
        api_key = ApiKeys([api_key])
    metrics = metrics or Metrics()
    named = [(model, tokenizer, name or model.config.name_or_path), *others]
    large = any(takes_media(each[1], each[0].config) or transcribes(each[1], each[0].config) for each in named)
    access = Access(api_key, allowed_hosts, max_body_size or (20 << 20 if large else 1 << 20), body_timeout)
    names = [*(each[2] for each in named), *(adapters or ())]
    if len(set(names)) < len(names):
        raise ValueError(f"two models have the same name: {names}")
    of_all = partial(ServedModel, length=max_length, places=max_queue_size, metrics=metrics)
    of_all = partial(of_all, pooling=pooling, normalizes=normalize, batch_only=batch_only)
    of_all = partial(of_all, image_limits=ImageLimits(max_images, max_image_pixels))
    of_all = partial(of_all, sound_limits=SoundLimits(max_sounds, max_sound_seconds))
    served = [of_all(*named[0], adapters=adapters), *(of_all(*each) for each in others)]
    service = Service(served, max_queue_size, metrics)
    # A redirect would contain the server's own host and scheme, not the host and scheme of a proxy in front of it.
    app = FastAPI(title="oslo-models", docs_url=None, redoc_url=None, redirect_slashes=False)

    def observe(route: str, status: int, seconds: float) -> None:
        metrics.count("requests_total", route=route, status=str(status))
        metrics.observe("request_seconds", seconds, route=route)

    app.add_middleware(Guard, access=access, observe=observe)
    if allowed_origins:  # outside the guard, because browsers send no key with a preflight request
        sent: dict[str, Any] = {"allow_headers": ["*"], "expose_headers": ["X-Request-Id"]}
        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["GET", "POST"], **sent)
    for kind in (StarletteHTTPException, RequestValidationError, ValueError, TemplateError, EngineError):
        app.add_exception_handler(kind, _error_response)
    _add_routes(app, service, metrics)
    return app


def _add_routes(app: FastAPI, service: Service, metrics: Metrics) -> None:
    async def measured() -> PlainTextResponse:
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    app.add_api_route("/health", service.health, methods=["GET"])
    app.add_api_route(LIVE, service.live, methods=["GET"])
    app.add_api_route(READY, service.ready, methods=["GET"])
    app.add_api_route("/metrics", measured, methods=["GET"])
    app.add_api_route("/generate_text/{text}", service.generate_text, methods=["GET"])
    app.add_api_route("/v1/models", service.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", service.model, methods=["GET"])
    endpoints, bodies = Endpoints(service), Bodies()
    posts: list[tuple[str, Any, Any]] = [
        ("/v1/completions", CompletionRequest, service.completions),
        ("/v1/chat/completions", ChatRequest, service.chat),
        ("/v1/responses", ResponsesRequest, endpoints.responses),
        ("/v1/embeddings", EmbeddingRequest, endpoints.embeddings),
        ("/tokenize", TokenizeRequest, endpoints.tokenize),
        ("/detokenize", DetokenizeRequest, endpoints.detokenize),
    ]
    for path, transcribed in (("transcriptions", endpoints.transcriptions), ("translations", endpoints.translations)):
        app.add_api_route(f"/v1/audio/{path}", transcribed, methods=["POST"], response_model=None)
    for path, kind, answer in posts:
        app.add_api_route(path, bodies.endpoint(kind, answer), methods=["POST"], response_model=None)
