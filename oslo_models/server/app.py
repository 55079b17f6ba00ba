"""HTTP for a deployed model: OpenAI's endpoints for completions and chats, and the one of OSLO's documents.

Of transformers' own server, what turns messages into a prompt and tokens into text, reasoning and tool calls is used.
Its handlers are not: they generate in one thread, so that nothing could be batched, seed this process instead of the
workers, answer malformed requests with status 500, and leave stop strings in the text.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import signal
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException
from transformers import AutoConfig, AutoTokenizer
from transformers.cli.serving.utils import (
    DirectStreamer,
    ReasoningText,
    ToolCall,
    build_response_parser,
    parse_assistant_message,
)

from oslo_models import auto
from oslo_models.deploy.errors import EngineError
from oslo_models.server.schema import Answer, ChatRequest, CompletionRequest, Stops, event, problem, tally

UNKNOWN_LENGTH = 2048
"""Tokens of prompt and answer, for models whose configuration states no limit."""


@dataclass
class _Call:
    """One `generate` that is to be made."""

    ids: list[int]
    most: int
    settings: dict[str, Any]
    seed: int | None
    stops: list[str]
    chat: bool


class Service:
    """What the routes share: the model, its tokenizer, and places for those who wait.

    Args:
        length: tokens that a prompt and its answer may have together.
        places: calls that may run or wait; for more there is status 429.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, length: int | None, places: int) -> None:
        if not hasattr(tokenizer, "_tokenizer"):
            raise ValueError(f"{type(tokenizer).__name__} cannot decode token by token; a fast tokenizer is needed")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        own = getattr(model.config, "max_position_embeddings", None) or length or UNKNOWN_LENGTH
        self.length = min(own, length or own)
        self.places, self.taken = places, 0
        self.created = int(time.time())
        self._threads = ThreadPoolExecutor(places, "oslo-serve")
        ends = model.generation_config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        pad = model.generation_config.pad_token_id
        self._pad = {} if pad is not None or ends is None else {"pad_token_id": self._ends[0]}

    async def completions(self, request: CompletionRequest) -> Response:
        return await self._answer(request)

    async def chat(self, request: ChatRequest) -> Response:
        return await self._answer(request)

    async def generate_text(
        self, text: str, max_length: int = 15, num_beams: int = 5, no_repeat_ngram_size: int = 4
    ) -> dict[str, str]:
        """As in OSLO's documents, with their settings unless the query has others."""
        (ids,) = await asyncio.to_thread(CompletionRequest(prompt=text).encode, self.tokenizer)
        most = max_length - (1 if self.model.config.is_encoder_decoder else len(ids))
        if most < 1:
            raise ValueError(f"max_length={max_length} leaves no room after the {len(ids)} tokens of the text")
        asked = CompletionRequest(
            prompt=ids, max_tokens=most, num_beams=num_beams, no_repeat_ngram_size=no_repeat_ngram_size
        )
        with self._placed(1):
            out_BL = await self._generate(*self._calls(asked, [ids]))
        return {"inputs": text, "outputs": self.tokenizer.decode(out_BL[0], skip_special_tokens=True)}

    async def models(self) -> dict[str, Any]:
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "oslo-models"}
        return {"object": "list", "data": [{**entry, "max_model_len": self.length}]}

    async def health(self) -> Response:
        """200 if all workers answer, else 503; with what is known of each."""
        state = await asyncio.to_thread(self.model.health)
        return JSONResponse(state, 200 if state["healthy"] else 503)

    async def _answer(self, request: CompletionRequest | ChatRequest) -> Response:
        if request.model not in (None, self.name):
            raise HTTPException(404, f"there is no model {request.model!r} here, only {self.name!r}")
        prompts = await asyncio.to_thread(request.encode, self.tokenizer)
        calls = self._calls(request, prompts)
        head = {"id": f"{request.kind[0]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if request.stream:
            events = self._events(request, calls, {**head, "object": request.kind[2]})
            first = await anext(events)  # what is wrong with the request shows by now, and gets a status of its own
            return StreamingResponse(_guarded(first, events), media_type="text/event-stream")
        with self._placed(len(calls)):
            ended = await asyncio.gather(*map(self._whole, calls), return_exceptions=True)
        answers: list[Answer] = []
        for answer in ended:
            if isinstance(answer, BaseException):
                raise answer
            answers.append(answer)
        choices = [
            {"index": index, **request.choice(one, False, True), "finish_reason": one.finish}
            for index, one in enumerate(answers)
        ]
        usage = tally(prompts, [one.tokens for one in answers])
        return JSONResponse({**head, "object": request.kind[1], "choices": choices, "usage": usage})

    def _calls(self, request: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> list[_Call]:
        """One for each choice.

        Raises:
            ValueError: a prompt is empty, too long, or has tokens that the model does not know.
        """
        if (count := len(prompts) * request.n) > self.places:
            raise ValueError(f"{count} answers are asked for at once; at most {self.places} can be")
        settings = {**request.settings(self.model.generation_config), **self._pad}
        calls = []
        for index, ids in enumerate(prompts):
            if not ids or not all(0 <= token < self.model.config.vocab_size for token in ids):
                raise ValueError("a prompt is empty" if not ids else "a prompt has tokens that the model does not know")
            left = self.length - (0 if self.model.config.is_encoder_decoder else len(ids))
            most = request.most(left)
            if len(ids) > self.length or most > left or left < 1:
                raise ValueError(
                    f"{len(ids)} tokens and {most} to come are more than the {self.length} that can be held"
                )
            for choice in range(request.n):
                seed = None if request.seed is None else (request.seed + index * request.n + choice) % 2**32
                calls.append(_Call(ids, most, settings, seed, request.stops, isinstance(request, ChatRequest)))
        return calls

    @contextmanager
    def _placed(self, count: int) -> Iterator[None]:
        if self.taken + count > self.places:
            raise HTTPException(429, f"{self.taken} calls are waiting or running already", {"Retry-After": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    def _generate(self, call: _Call, streamer: Any = None) -> asyncio.Future[torch.Tensor]:
        ids_BL = torch.tensor([call.ids])
        inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "max_new_tokens": call.most}
        seed = call.seed if call.settings["do_sample"] else None  # calls with a seed are not joined with others
        options = {**inputs, **call.settings, "streamer": streamer, "seed": seed}
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(self.model.generate, **options))

    def _ending(self, call: _Call, out_BL: torch.Tensor) -> tuple[list[int], str]:
        """The new tokens, and why there are no more."""
        new = out_BL[0, 1 if self.model.config.is_encoder_decoder else len(call.ids) :].tolist()
        return new, "length" if len(new) >= call.most and new[-1] not in self._ends else "stop"

    async def _whole(self, call: _Call) -> Answer:
        whole = Answer()
        if call.stops:
            async for piece in self._pieces(call):
                whole.content += piece.content
                whole.reasoning += piece.reasoning
                whole.tool_calls += piece.tool_calls
                whole.tokens, whole.finish = piece.tokens, piece.finish
            return whole
        new, whole.finish = self._ending(call, await self._generate(call))
        whole.tokens, whole.content = len(new), self.tokenizer.decode(new, skip_special_tokens=True)
        if call.chat:
            parsed = parse_assistant_message(self.tokenizer, self.model, new, call.ids, whole.content)
            whole.content, whole.reasoning = parsed[0], parsed[1] or ""
            whole.tool_calls = list(enumerate(parsed[2] or []))
            whole.finish = "tool_calls" if whole.tool_calls else whole.finish
        return whole

    async def _pieces(self, call: _Call) -> AsyncIterator[Answer]:
        """The answer as it grows. Whoever stops iterating stops the workers."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        parser = build_response_parser(self.tokenizer, self.model, call.ids) if call.chat else None
        if parser is not None:
            parser.initial_events.clear()  # the prompt's own text is no answer
        streamer = DirectStreamer(self.tokenizer._tokenizer, asyncio.get_running_loop(), queue, parser)
        stops, seen, tools, finish = Stops(call.stops), "", 0, ""
        computed = self._generate(call, streamer)
        computed.add_done_callback(partial(_end, queue))
        try:
            while not stops.hit and (item := await queue.get()) is not None:
                if isinstance(item, ToolCall):
                    yield Answer(tool_calls=[(tools, item)])
                    tools += 1
                elif isinstance(item, ReasoningText):
                    yield Answer(reasoning=item)
                elif text := stops.feed(item):
                    yield Answer(text)
                seen += item if isinstance(item, str) else ""
            rest = ""
            if not stops.hit:
                new, finish = self._ending(call, await computed)
                text = self.tokenizer.decode(new, skip_special_tokens=True)
                if parser is None and text.startswith(seen):  # it may end in a character that was never completed
                    rest = stops.feed(text[len(seen) :])
                rest += "" if stops.hit else stops.held
            finish = "tool_calls" if tools else "stop" if stops.hit else finish
            yield Answer(rest, tokens=streamer.total_tokens, finish=finish)
        finally:
            streamer.cancel()

    async def _events(
        self, request: CompletionRequest | ChatRequest, calls: list[_Call], head: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """Server-sent events, one choice after the other."""
        tokens = []
        with self._placed(len(calls)):
            for index, call in enumerate(calls):
                first = True
                async for piece in self._pieces(call):
                    choice = {"index": index, **request.choice(piece, True, first), "finish_reason": piece.finish}
                    yield event({**head, "choices": [choice]})
                    first = False
                tokens.append(piece.tokens)
        if request.stream_options.get("include_usage"):
            prompts = [call.ids for call in calls[:: request.n]]
            yield event({**head, "choices": [], "usage": tally(prompts, tokens)})
        yield "data: [DONE]\n\n"


def _end(queue: asyncio.Queue[Any], computed: asyncio.Future[torch.Tensor]) -> None:
    """Say so in the queue when nothing more can come; an error was nobody's if the reader has left."""
    if not computed.cancelled():
        computed.exception()
    queue.put_nowait(None)


async def _guarded(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events; what goes wrong after the first is one of them."""
    yield first
    try:
        async for more in events:
            yield more
    except Exception as error:  # noqa: BLE001  the status has been sent
        yield event(problem(error)[1])


async def _refuse(request: Request, error: Exception) -> Response:
    status, body = problem(error)
    return JSONResponse(body, status, getattr(error, "headers", None))


# The server -----------------------------------------------------------------------------------------------------------


class _Limited:
    """ASGI middleware: bodies of requests are not read further than they may be long."""

    def __init__(self, app: Any, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size = 0

        async def counted() -> Any:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.most:
                raise HTTPException(413, f"the request is longer than {self.most} bytes")
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
        max_queue_size: calls that may run or wait; more are answered with status 429.
        max_length: tokens that a prompt and its answer may have together (default: what the model can).
        max_body_size: bytes of a request; longer ones are answered with status 413.
        api_key: what requests have to bring as ``Authorization: Bearer ...``, but for ``/health``.

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
    app.add_middleware(_Limited, most=max_body_size)
    for kind in (StarletteHTTPException, RequestValidationError, ValueError, TemplateError, EngineError, Exception):
        app.add_exception_handler(kind, _refuse)
    app.add_api_route("/health", service.health, methods=["GET"])
    guards = [] if api_key is None else [Depends(check_key)]
    app.add_api_route("/generate_text/{text}", service.generate_text, methods=["GET"], dependencies=guards)
    app.add_api_route("/v1/models", service.models, methods=["GET"], dependencies=guards)
    app.add_api_route("/v1/completions", service.completions, methods=["POST"], dependencies=guards)
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], dependencies=guards)
    return app


def require_sendable(api_key: str | None) -> None:
    """Raise ``ValueError`` for a key that protects nothing, or that no client can send; the message is without it."""
    if api_key is not None and not (isinstance(api_key, str) and api_key.strip()):
        raise ValueError(
            "the API key is empty, so that everybody could use the server: pass a key (a file or variable that it is "
            "from may be empty or missing), or none at all for a server that is open on purpose"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and " " not in api_key):
        raise ValueError("the API key has characters other than printable ASCII without spaces, such as a line's end")


def run(args: argparse.Namespace) -> None:
    """Serve until SIGTERM or Ctrl-C; requests that run by then are answered.

    Args:
        args: the options of ``oslo-models serve``.

    Raises:
        OSError: the port is taken, or there is no such model.
        ValueError: an option is wrong.
    """
    require_sendable(args.api_key)
    with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((args.host, args.port))  # what fails, fails before the model is loaded
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
            # uvicorn ends in order on SIGTERM and then raises it again, for whoever handled it before: this is success
            signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
            listener.listen(2048)
            host, port = listener.getsockname()[:2]
            print(f"{args.model} at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
            server.run(sockets=[listener])
