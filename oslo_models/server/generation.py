"""Answers of a deployed model: one call of `generate`, whole or piece by piece as it is generated."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.cli.serving.utils import (
    DirectStreamer,
    ReasoningText,
    ToolCall,
    build_response_parser,
    parse_assistant_message,
)

from oslo_models.server.schema import Answer, Stops


@dataclass
class GenerationJob:
    """One call of `generate` to be made.

    Attributes:
        ids: the tokens of the prompt.
        max_new_tokens: of the answer.
        settings: further arguments of `generate`.
        stops: the answer ends before the first of these strings.
        chat: whether reasoning and tool calls are parsed from the text.
    """

    ids: list[int]
    max_new_tokens: int
    settings: dict[str, Any]
    seed: int | None
    stops: list[str]
    chat: bool


class AnswerGenerator:
    """Generates answers in threads of its own, so that the model can batch them.

    Args:
        model: a deployed model.
        threads: how many calls may be under way.
    """

    def __init__(self, model: Any, tokenizer: Any, threads: int) -> None:
        self.model, self.tokenizer = model, tokenizer
        self._threads = ThreadPoolExecutor(threads, "oslo-serve")
        ends = model.generation_config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        pad = model.generation_config.pad_token_id
        self._padding = {} if pad is not None or ends is None else {"pad_token_id": self._ends[0]}

    def generate(self, job: GenerationJob, streamer: Any = None) -> asyncio.Future[torch.Tensor]:
        """Start the call; the result is [1, tokens], with the prompt unless the model is an encoder-decoder."""
        ids_BL = torch.tensor([job.ids])
        inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "max_new_tokens": job.max_new_tokens}
        seed = job.seed if job.settings["do_sample"] else None  # calls with a seed are not batched with others
        options = {**inputs, **job.settings, **self._padding, "streamer": streamer, "seed": seed}
        return asyncio.get_running_loop().run_in_executor(self._threads, partial(self.model.generate, **options))

    def _new_tokens(self, job: GenerationJob, out_BL: torch.Tensor) -> tuple[list[int], str]:
        """The new tokens, and the finish reason."""
        new = out_BL[0, 1 if self.model.config.is_encoder_decoder else len(job.ids) :].tolist()
        return new, "length" if len(new) >= job.max_new_tokens and new[-1] not in self._ends else "stop"

    async def answer(self, job: GenerationJob) -> Answer:
        """The complete answer."""
        full = Answer()
        if job.stops:
            async for piece in self.stream(job):
                full.content += piece.content
                full.reasoning += piece.reasoning
                full.tool_calls += piece.tool_calls
                full.tokens, full.finish = piece.tokens, piece.finish
            return full
        new, full.finish = self._new_tokens(job, await self.generate(job))
        full.tokens, full.content = len(new), self.tokenizer.decode(new, skip_special_tokens=True)
        if job.chat:
            parsed = parse_assistant_message(self.tokenizer, self.model, new, job.ids, full.content)
            full.content, full.reasoning = parsed[0], parsed[1] or ""
            full.tool_calls = list(enumerate(parsed[2] or []))
            full.finish = "tool_calls" if full.tool_calls else full.finish
        return full

    async def stream(self, job: GenerationJob) -> AsyncIterator[Answer]:
        """The answer piece by piece as it is generated. Closing the iterator cancels the call."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        parser = build_response_parser(self.tokenizer, self.model, job.ids) if job.chat else None
        if parser is not None:
            parser.initial_events.clear()  # text of the prompt
        streamer = DirectStreamer(self.tokenizer._tokenizer, asyncio.get_running_loop(), queue, parser)
        stops, seen, tools, finish = Stops(job.stops), "", 0, ""
        result = self.generate(job, streamer)
        result.add_done_callback(partial(_close, queue))
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
                new, finish = self._new_tokens(job, await result)
                text = self.tokenizer.decode(new, skip_special_tokens=True)
                if parser is None and text.startswith(seen):  # the streamer withholds an incomplete last character
                    rest = stops.feed(text[len(seen) :])
                rest += "" if stops.hit else stops.held
            finish = "tool_calls" if tools else "stop" if stops.hit else finish
            yield Answer(rest, tokens=streamer.total_tokens, finish=finish)
        finally:
            streamer.cancel()


def _close(queue: asyncio.Queue[Any], result: asyncio.Future[torch.Tensor]) -> None:
    """Mark the end of the queue once nothing more can come."""
    if not result.cancelled():
        result.exception()  # marks it as retrieved: asyncio would report it if the reader has left
    queue.put_nowait(None)
