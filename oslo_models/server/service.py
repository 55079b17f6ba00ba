"""Routes of the server: OpenAI's endpoints for completions and chats, and the endpoint in OSLO's documentation.

The server uses transformers' code for chat templates, reasoning and tool calls, but not the handlers of transformers'
server. These generate in one thread, which rules out batching; seed this process instead of the workers; answer
malformed requests with status 500; and leave stop strings in the text.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from oslo_models.deploy.cancellation import Cancellation
from oslo_models.server.answers import Answer, chat_choice, completion_choice, event, tally
from oslo_models.server.errors import NAME, RequestError, problem
from oslo_models.server.guard import log
from oslo_models.server.metrics import Metrics
from oslo_models.server.rendering import json_response
from oslo_models.server.schema import ChatRequest, CompletionRequest
from oslo_models.server.served_model import TASKS, ServedModel
from oslo_models.server.token_reader import GenerationJob


class Service:
    """State shared by the routes: the models, and the limit of answers in flight.

    Args:
        models: the served models with their adapters. The first model answers requests without a model name.
        places: limit of running and waiting answers; further requests get status 429.
    """

    def __init__(self, models: Sequence[ServedModel], places: int, metrics: Metrics) -> None:
        self._models = models
        self._reasons: dict[str, str | None] = {}
        self.models_by_name = {each.name: each for model in models for each in (model, *model.adapted)}
        self.default, self.places, self.taken, self.metrics = models[0], places, 0, metrics
        metrics.gauge("calls_in_flight", lambda: self.taken)
        generators = [model.generator for model in models if model.generator]
        metrics.gauge("calls_waiting", lambda: sum(generator.waiting for generator in generators))
        metrics.gauge("calls_limit", lambda: places)
        metrics.gauge("reused_prompt_tokens_total", lambda: sum(each.model.reused_prompt_tokens for each in models))
        metrics.gauge("drafted_tokens_total", lambda: sum(each.model.drafted_tokens for each in models))
        metrics.gauge("accepted_tokens_total", lambda: sum(each.model.accepted_tokens for each in models))

    async def completions(self, request: CompletionRequest) -> Response:
        return await self._respond(request)

    async def chat(self, request: ChatRequest) -> Response:
        return await self._respond(request)

    async def generate_text(
        self, text: str, max_length: int = 15, num_beams: int = 5, no_repeat_ngram_size: int = 4
    ) -> dict[str, str]:
        """Implement the endpoint in OSLO's documentation. The defaults are OSLO's; the query can change them."""
        served = self.find(None, "generate")
        generator = served.generator
        assert generator is not None
        with self.admitted(1):
            served.check_texts([text])
            (ids,) = await served.in_tokenizer(CompletionRequest(prompt=text).encode, served.tokenizer)
            room = max_length - (1 if served.model.config.is_encoder_decoder else len(ids))
            if room < 1:
                raise ValueError(f"max_length={max_length} leaves no room after the {len(ids)} tokens of the text")
            asked: dict[str, Any] = {
                "num_beams": num_beams,
                "no_repeat_ngram_size": no_repeat_ngram_size,
                "max_tokens": room,
            }
            _, (job,) = await served.jobs(CompletionRequest(prompt=ids, **asked))
            cancellation = Cancellation()
            try:
                out_BL = await generator.start(job, cancellation)
            finally:
                cancellation.cancel()
        return {"inputs": text, "outputs": served.tokenizer.decode(out_BL[0], skip_special_tokens=True)}

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [_entry(served) for served in self.models_by_name.values()]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return one model. Its name may have slashes."""
        served = self.find(name, None)
        return _entry(served)

    async def health(self, request: Request) -> Response:
        """Return status 200 if all workers answer, else 503. The body has the state of each model.

        Reasons for failures may name files. They go to the log, and to clients with a key. On a server with keys,
        clients without a key see ``healthy`` only; a server without keys reports ``healthy`` and ``ranks``.
        """
        states = await asyncio.gather(*(served.health() for served in self._models))
        for served, state in zip(self._models, states, strict=True):
            if state["reason"] != self._reasons.get(served.name):
                self._reasons[served.name] = state["reason"]
                if state["reason"] is not None:
                    log.warning("%s: not healthy: %s", served.name, state["reason"])
        may_read = getattr(request.state, "has_key", None)  # None: the server has no keys
        if not may_read:
            kept = ("healthy", "ranks") if may_read is None else ("healthy",)
            states = [{name: state[name] for name in kept} for state in states]
        healthy = all(state["healthy"] for state in states)
        if len(states) == 1:
            return JSONResponse(states[0], 200 if healthy else 503)
        state = {"healthy": healthy, "models": dict(zip([each.name for each in self._models], states, strict=True))}
        return JSONResponse(state, 200 if healthy else 503)

    async def live(self) -> dict[str, str]:
        """Answer a liveness probe: this process is alive."""
        return {"status": "live"}

    async def ready(self) -> Response:
        """Answer a readiness probe: status 200 if all workers answer, else 503."""
        states = await asyncio.gather(*(served.health() for served in self._models))
        if all(state["healthy"] for state in states):
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "workers have died or do not answer"}, 503)

    def find(self, name: str | None, task: str | None) -> ServedModel:
        """Return the model for a request.

        Args:
            name: the name of the model; ``None`` for the first model with this task.
            task: what the model has to do, a key of `TASKS`; ``None`` for any.

        Raises:
            RequestError: no model has this name, or the model has another task.
        """
        able = [each for each in self.models_by_name.values() if task in (None, each.task)]
        served = next(iter(able), self.default) if name is None else self.models_by_name.get(name)
        if served is None:
            message = (
                f"there is no model {(name or '')[:NAME]!r} here, only {', '.join(map(repr, self.models_by_name))}"
            )
            raise RequestError(404, message, "model_not_found", "model")
        if task not in (None, served.task):
            raise RequestError(400, f"the model {served.name!r} only {TASKS[served.task]}", None, "model")
        return served

    async def _respond(self, request: CompletionRequest | ChatRequest) -> Response:
        served = self.find(request.model, "generate")
        count = len(request.prompts) * request.n
        if request.stream:
            events = self._events(request, served, count)
            first = await anext(events)  # until here, an error can still set the response status
            return StreamingResponse(with_errors(first, events), media_type="text/event-stream")
        with self.admitted(count):
            prompts, jobs = await served.jobs(request)
            answers = await self._answers(served, jobs)

        def body() -> dict[str, Any]:
            choices = [
                {"index": index, **_choice(request, one, False, True), "finish_reason": one.finish}
                for index, one in enumerate(answers)
            ]
            usage = tally(prompts, [one.tokens for one in answers])
            return {**_head(request, served, 1), "choices": choices, "usage": usage}

        return await json_response(body, sum(len(one.scores) for one in answers) * (1 + (request.logprobs_asked or 0)))

    async def _answers(self, served: ServedModel, jobs: list[GenerationJob]) -> list[Answer]:
        """Generate all answers. If one fails, cancel the others."""
        assert served.generator is not None
        tasks = [asyncio.ensure_future(served.generator.answer(job)) for job in jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @contextmanager
    def admitted(self, count: int) -> Iterator[None]:
        """Hold ``count`` places inside the block.

        Raises:
            RequestError: not enough places are free.
        """
        if count > self.places:
            raise RequestError(400, f"{count} answers are asked for at once; at most {self.places} can be")
        if self.taken + count > self.places:
            self.metrics.count("rejected_requests_total")
            message = f"{self.taken} calls are waiting or running already"
            raise RequestError(429, message, headers={"Retry-After": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def _events(
        self, request: CompletionRequest | ChatRequest, served: ServedModel, count: int
    ) -> AsyncGenerator[str, None]:
        """Yield server-sent events. The choices are computed together, so their pieces alternate."""
        assert served.generator is not None
        counts_usage = request.stream_options.get("include_usage", False)
        with self.admitted(count):
            prompts, jobs = await served.jobs(request)
            head = {**_head(request, served, 2), **({"usage": None} if counts_usage else {})}
            tokens = [0] * len(jobs)
            begun: set[int] = set()
            async with contextlib.aclosing(_together([served.generator.stream(job) for job in jobs])) as pieces:
                async for index, piece in pieces:
                    choice = {"index": index, **_choice(request, piece, True, index not in begun)}
                    yield event({**head, "choices": [{**choice, "finish_reason": piece.finish}]})
                    begun.add(index)
                    tokens[index] = piece.tokens
        if counts_usage:
            yield event({**head, "choices": [], "usage": tally(prompts, tokens)})
        yield "data: [DONE]\n\n"


async def _together(streams: Sequence[AsyncGenerator[Answer, None]]) -> AsyncGenerator[tuple[int, Answer], None]:
    """Yield the pieces of several answers with their indices, as they arrive. If one fails, cancel the others."""
    if len(streams) == 1:  # without a task and a queue, which would cost time for each token
        async with contextlib.aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Answer] | BaseException | None] = asyncio.Queue()

    async def forward(index: int, stream: AsyncGenerator[Answer, None]) -> None:
        try:
            async with contextlib.aclosing(stream):
                async for piece in stream:
                    queue.put_nowait((index, piece))
        except Exception as error:  # noqa: BLE001  raised below
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.ensure_future(forward(index, stream)) for index, stream in enumerate(streams)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _entry(served: ServedModel) -> dict[str, Any]:
    about = {"id": served.name, "object": "model", "created": served.created, "owned_by": "oslo-models"}
    parent = {} if served.parent is None else {"parent": served.parent}
    return {**about, **parent, "max_model_len": served.length}


def _head(request: CompletionRequest | ChatRequest, served: ServedModel, kind: int) -> dict[str, Any]:
    head = {"id": f"{request.kind[0]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": served.name}
    return {**head, "object": request.kind[kind]}


def _choice(request: CompletionRequest | ChatRequest, answer: Answer, delta: bool, first: bool) -> Mapping[str, Any]:
    if isinstance(request, ChatRequest):
        return chat_choice(answer, delta, first, request.logprobs_asked)
    return completion_choice(answer, request.logprobs_asked)


async def with_errors(first: str, events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield the events. An error after the first becomes the last event, because the status has been sent."""
    try:
        yield first
        async for more in events:
            yield more
    except Exception as error:  # noqa: BLE001  reported to the client
        yield event(problem(error)[1])
    finally:
        await events.aclose()
