"""The routes of the server: OpenAI's endpoints for completions and chats, and the one of OSLO's documents.

Of transformers' own server, the code that turns messages into a prompt, and tokens into text, reasoning and tool calls,
is used. Its handlers are not: they generate in one thread, so that nothing could be batched, seed this process instead
of the workers, answer malformed requests with status 500, and leave stop strings in the text.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse

from oslo_models.server.generation import AnswerGenerator, GenerationJob
from oslo_models.server.schema import Answer, ChatRequest, CompletionRequest, event, problem, tally

UNKNOWN_LENGTH = 2048
"""Tokens of prompt and answer, for models whose configuration states no limit."""


class Service:
    """What the routes share: the model, its tokenizer, and the limits of what is accepted.

    Args:
        length: tokens that a prompt and its answer may have together.
        places: calls that may run or wait; further requests are answered with status 429.
    """

    def __init__(self, model: Any, tokenizer: Any, name: str, length: int | None, places: int) -> None:
        if not hasattr(tokenizer, "_tokenizer"):
            raise ValueError(f"{type(tokenizer).__name__} cannot decode token by token; a fast tokenizer is needed")
        self.model, self.tokenizer, self.name = model, tokenizer, name
        own = getattr(model.config, "max_position_embeddings", None) or length or UNKNOWN_LENGTH
        self.length = min(own, length or own)
        self.places, self.taken = places, 0
        self.created = int(time.time())
        self._generator = AnswerGenerator(model, tokenizer, places)

    async def completions(self, request: CompletionRequest) -> Response:
        return await self._respond(request)

    async def chat(self, request: ChatRequest) -> Response:
        return await self._respond(request)

    async def generate_text(
        self, text: str, max_length: int = 15, num_beams: int = 5, no_repeat_ngram_size: int = 4
    ) -> dict[str, str]:
        """As in OSLO's documents, with their settings unless the query has others."""
        (ids,) = await asyncio.to_thread(CompletionRequest(prompt=text).encode, self.tokenizer)
        room = max_length - (1 if self.model.config.is_encoder_decoder else len(ids))
        if room < 1:
            raise ValueError(f"max_length={max_length} leaves no room after the {len(ids)} tokens of the text")
        asked = CompletionRequest(
            prompt=ids, max_tokens=room, num_beams=num_beams, no_repeat_ngram_size=no_repeat_ngram_size
        )
        with self._admitted(1):
            out_BL = await self._generator.generate(*self._jobs(asked, [ids]))
        return {"inputs": text, "outputs": self.tokenizer.decode(out_BL[0], skip_special_tokens=True)}

    async def models(self) -> dict[str, Any]:
        entry = {"id": self.name, "object": "model", "created": self.created, "owned_by": "oslo-models"}
        return {"object": "list", "data": [{**entry, "max_model_len": self.length}]}

    async def health(self) -> Response:
        """Status 200 if all workers answer, else 503; the body has the state of each."""
        state = await asyncio.to_thread(self.model.health)
        return JSONResponse(state, 200 if state["healthy"] else 503)

    async def _respond(self, request: CompletionRequest | ChatRequest) -> Response:
        if request.model not in (None, self.name):
            raise HTTPException(404, f"there is no model {request.model!r} here, only {self.name!r}")
        prompts = await asyncio.to_thread(request.encode, self.tokenizer)
        jobs = self._jobs(request, prompts)
        head = {"id": f"{request.kind[0]}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.name}
        if request.stream:
            events = self._events(request, jobs, {**head, "object": request.kind[2]})
            first = await anext(events)  # an error raised up to here still gets a status of its own
            return StreamingResponse(_with_errors(first, events), media_type="text/event-stream")
        with self._admitted(len(jobs)):
            ended = await asyncio.gather(*map(self._generator.answer, jobs), return_exceptions=True)
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

    def _jobs(self, request: CompletionRequest | ChatRequest, prompts: list[list[int]]) -> list[GenerationJob]:
        """One for each choice.

        Raises:
            ValueError: a prompt is empty, too long, or has tokens that the model does not know.
        """
        if (count := len(prompts) * request.n) > self.places:
            raise ValueError(f"{count} answers are asked for at once; at most {self.places} can be")
        settings = request.settings(self.model.generation_config)
        jobs = []
        for index, ids in enumerate(prompts):
            if not ids or not all(0 <= token < self.model.config.vocab_size for token in ids):
                raise ValueError("a prompt is empty" if not ids else "a prompt has tokens that the model does not know")
            room = self.length - (0 if self.model.config.is_encoder_decoder else len(ids))
            new_tokens = request.max_new_tokens(room)
            if len(ids) > self.length or new_tokens > room or room < 1:
                raise ValueError(
                    f"{len(ids)} tokens and {new_tokens} to come are more than the {self.length} that can be held"
                )
            for choice in range(request.n):
                seed = None if request.seed is None else (request.seed + index * request.n + choice) % 2**32
                is_chat = isinstance(request, ChatRequest)
                jobs.append(GenerationJob(ids, new_tokens, settings, seed, request.stops, is_chat))
        return jobs

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        """Hold so many places.

        Raises:
            HTTPException: status 429, there are not enough.
        """
        if self.taken + count > self.places:
            raise HTTPException(429, f"{self.taken} calls are waiting or running already", {"Retry-After": "1"})
        self.taken += count
        try:
            yield
        finally:
            self.taken -= count

    async def _events(
        self, request: CompletionRequest | ChatRequest, jobs: list[GenerationJob], head: Mapping[str, Any]
    ) -> AsyncIterator[str]:
        """Server-sent events, one choice after the other."""
        tokens = []
        with self._admitted(len(jobs)):
            for index, job in enumerate(jobs):
                first = True
                async for piece in self._generator.stream(job):
                    choice = {"index": index, **request.choice(piece, True, first), "finish_reason": piece.finish}
                    yield event({**head, "choices": [choice]})
                    first = False
                tokens.append(piece.tokens)
        if request.stream_options.get("include_usage"):
            prompts = [job.ids for job in jobs[:: request.n]]
            yield event({**head, "choices": [], "usage": tally(prompts, tokens)})
        yield "data: [DONE]\n\n"


async def _with_errors(first: str, events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events; an error after the first becomes the last event, as the status has been sent."""
    yield first
    try:
        async for more in events:
            yield more
    except Exception as error:  # noqa: BLE001  reported to the client
        yield event(problem(error)[1])
