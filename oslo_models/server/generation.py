"""Answers of a deployed model: one call of `generate`, whole or piece by piece as it is generated."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.cli.serving.utils import (
    ReasoningText,
    ToolCall,
    build_response_parser,
    parse_assistant_message,
    response_events_to_chunks,
)

from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.decoding import Decoding, Scored
from oslo_models.deploy.grammar import Grammar, MissingVocabulary, Vocabulary
from oslo_models.server.answers import Answer, TokenScore
from oslo_models.server.metrics import Metrics
from oslo_models.server.text import StopStrings, token_decoder


@dataclass
class GenerationJob:
    """One call of `generate` to be made.

    Attributes:
        ids: the tokens of the prompt.
        max_new_tokens: of the answer.
        settings: further arguments of `generate`.
        stops: the answer ends before the first of these strings.
        stop_tokens: and before these tokens.
        decoding: penalties, grammar and log-probabilities; ``None`` if none is asked for.
        chat: whether reasoning and tool calls are parsed from the text.
        forced_tool: the text is a tool call in JSON.
        single_tool: tool calls after the first are dropped.
        skip_special_tokens: in the text.
    """

    ids: list[int]
    max_new_tokens: int
    settings: dict[str, Any]
    seed: int | None
    stops: list[str]
    stop_tokens: list[int]
    decoding: Decoding | None = None
    chat: bool = False
    forced_tool: bool = False
    single_tool: bool = False
    skip_special_tokens: bool = True


class AnswerGenerator:
    """Generates answers in threads of its own, so that the model can batch them.

    Args:
        model: a deployed model.
        threads: how many calls may be under way.
    """

    def __init__(self, model: Any, tokenizer: Any, threads: int, metrics: Metrics) -> None:
        self.model, self.tokenizer, self.metrics = model, tokenizer, metrics
        # A thread outlives a cancelled call if it leads a batch with calls of others.
        self._threads = ThreadPoolExecutor(2 * threads, "oslo-serve")
        ends = model.generation_config.eos_token_id
        self.ends = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
        pad = model.generation_config.pad_token_id
        self._padding = {} if pad is not None or not self.ends else {"pad_token_id": self.ends[0]}
        self._vocabulary: Vocabulary | None = None
        self._readers: set[TokenReader] = set()

    @property
    def waiting(self) -> int:
        """Streamed calls whose computation has not begun."""
        return sum(reader.waiting for reader in list(self._readers))

    @property
    def vocabulary(self) -> Vocabulary:
        """For grammars. Raises ``ValueError`` if this tokenizer cannot be used for them."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.of(self.tokenizer, self.model.config.vocab_size, self.ends)
        return self._vocabulary

    def compiled(self, grammar: tuple[str, Any]) -> Grammar:
        """A grammar of a request. Raises ``ValueError`` if it is invalid."""
        return Grammar.compiled(*grammar, self.vocabulary)

    def _generate(self, job: GenerationJob, cancellation: Cancellation, streamer: Any) -> torch.Tensor:
        """Make the call, in this thread."""
        ids_BL = torch.tensor([job.ids])
        inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "max_new_tokens": job.max_new_tokens}
        seed = job.seed if job.settings["do_sample"] else None  # calls with a seed are not batched with others
        options = {**inputs, **job.settings, **self._padding, "streamer": streamer, "seed": seed}
        options["cancellation"] = cancellation
        if job.stop_tokens:
            options["eos_token_id"] = [*self.ends, *job.stop_tokens]
        if job.decoding is None:
            return self.model.generate(**options)
        try:
            return self.model.generate(**options, decoding=job.decoding)
        except MissingVocabulary:
            assert job.decoding.grammar is not None
            grammar = job.decoding.grammar.with_vocabulary(self.vocabulary)
            return self.model.generate(**options, decoding=replace(job.decoding, grammar=grammar))

    def start(
        self, job: GenerationJob, cancellation: Cancellation, streamer: Any = None
    ) -> asyncio.Future[torch.Tensor]:
        """Start the call; the result is [1, tokens], with the prompt unless the model is an encoder-decoder."""
        self.metrics.count("prompt_tokens_total", len(job.ids))
        call = partial(self._generate, job, cancellation, streamer)
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _new_tokens(self, job: GenerationJob, out_BL: torch.Tensor) -> tuple[list[int], str]:
        """The new tokens without a stop token at their end, and the finish reason."""
        new = out_BL[0, 1 if self.model.config.is_encoder_decoder else len(job.ids) :].tolist()
        self.metrics.count("generated_tokens_total", len(new))
        if new and new[-1] in job.stop_tokens:
            return new[:-1], "stop"
        return new, "length" if len(new) >= job.max_new_tokens and new[-1] not in self.ends else "stop"

    async def answer(self, job: GenerationJob) -> Answer:
        """The complete answer. Cancelling the task cancels the call."""
        full = Answer()
        if job.stops or job.decoding is not None:
            async with contextlib.aclosing(self.stream(job)) as pieces:
                async for piece in pieces:
                    full.add(piece)
            return full
        cancellation = Cancellation()
        try:
            new, full.finish = self._new_tokens(job, await self.start(job, cancellation))
        except asyncio.CancelledError:
            self.metrics.count("cancelled_calls_total")
            raise
        finally:
            cancellation.cancel()
        full.tokens, full.content = len(new), self.tokenizer.decode(new, skip_special_tokens=job.skip_special_tokens)
        if job.chat:
            parsed = parse_assistant_message(self.tokenizer, self.model, new, job.ids, full.content)
            full.content, full.reasoning = parsed[0], parsed[1] or ""
            full.tool_calls = list(enumerate(parsed[2] or []))[: 1 if job.single_tool else None]
            full.finish = "tool_calls" if full.tool_calls else full.finish
        return full

    async def stream(self, job: GenerationJob) -> AsyncGenerator[Answer, None]:
        """The answer piece by piece as it is generated. Closing the iterator cancels the call."""
        queue: asyncio.Queue[Answer | None] = asyncio.Queue()
        loop, cancellation = asyncio.get_running_loop(), Cancellation()

        def deliver(piece: Answer | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        reader = TokenReader(self, job, cancellation, deliver)
        self._readers.add(reader)
        result = self.start(job, cancellation, reader)
        result.add_done_callback(partial(_close, queue))
        complete = False
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            last = reader.last(None if reader.stopped else self._new_tokens(job, await result))
            complete = True
            yield last
        finally:
            if not complete:
                self.metrics.count("cancelled_calls_total")
            self._readers.discard(reader)
            cancellation.cancel()


def _close(queue: asyncio.Queue[Answer | None], result: asyncio.Future[torch.Tensor]) -> None:
    """Mark the end of the queue once nothing more can come."""
    if not result.cancelled():
        result.exception()  # marks it as retrieved: asyncio would report it if the reader has left
    queue.put_nowait(None)


class TokenReader:
    """The streamer of a call: makes text of its tokens, in the thread of the call, and ends it at a stop string.

    Args:
        deliver: takes the pieces of the answer.
    """

    def __init__(
        self,
        owner: AnswerGenerator,
        job: GenerationJob,
        cancellation: Cancellation,
        deliver: Callable[[Answer], object],
    ) -> None:
        self._owner, self._job, self._cancellation, self._deliver = owner, job, cancellation, deliver
        parses = job.chat and not job.forced_tool
        self._parser = build_response_parser(owner.tokenizer, owner.model, job.ids) if parses else None
        if self._parser is not None:
            self._parser.initial_events.clear()  # text of the prompt
        skips = job.skip_special_tokens and self._parser is None
        self._decoder = token_decoder(owner.tokenizer, skips)
        self._stops, self._seen = StopStrings(job.stops), ""
        self._tokens, self._tools, self._offset = 0, 0, 0
        self._scores: list[TokenScore] = []
        self.waiting = True  # for the prompt, which is the first value
        self._times = [time.monotonic()]  # when it was asked for, when each token came

    @property
    def stopped(self) -> bool:
        """Whether a stop string has been found."""
        return self._stops.hit

    def put(self, value: torch.Tensor | Scored) -> None:
        if self._cancellation.cancelled:
            raise CallCancelled("nobody waits for the answer")
        if self.waiting:
            self.waiting = False
            self._owner.metrics.observe("queue_seconds", time.monotonic() - self._times[0])
            return
        self._times.append(time.monotonic())
        if len(self._times) == 2:
            self._owner.metrics.observe("time_to_first_token_seconds", self._times[1] - self._times[0])
        for token in [value.token] if isinstance(value, Scored) else value.tolist():
            self._tokens += 1
            if token in self._job.stop_tokens:
                continue
            if isinstance(value, Scored) and token not in self._owner.ends:
                self._scores.append(TokenScore.of(value, self._offset, self._owner.tokenizer))
                self._offset += len(self._scores[-1].text)
            self._read(self._decoder.step(token))
        if self.stopped:
            raise CallCancelled("a stop string was generated")

    def end(self) -> None:
        """The rest is known once the call has returned; see `last`."""

    def _read(self, text: str) -> None:
        if not text or self.stopped:
            return
        self._seen += text
        self._read_items([text] if self._parser is None else response_events_to_chunks(self._parser.feed(text)))

    def _read_items(self, items: list[Any]) -> None:
        for item in items:
            if isinstance(item, ToolCall):
                self._tool(item)
            elif isinstance(item, ReasoningText):
                self._deliver(self._piece(reasoning=item))
            elif not self.stopped and (passed := self._stops.feed(item)) and not self._job.forced_tool:
                self._deliver(self._piece(content=passed))

    def _tool(self, call: ToolCall) -> None:
        if not (self._job.single_tool and self._tools):
            self._deliver(self._piece(tool_calls=[(self._tools, call)]))
            self._tools += 1

    def _piece(self, **parts: Any) -> Answer:
        scores, self._scores = self._scores, []
        return Answer(**parts, scores=scores)

    def last(self, ended: tuple[list[int], str] | None) -> Answer:
        """The last piece.

        Args:
            ended: the new tokens of the call and its finish reason; ``None`` if a stop string has ended it.
        """
        if self._tokens > 1:
            average = (self._times[-1] - self._times[1]) / (self._tokens - 1)
            self._owner.metrics.observe("time_per_token_seconds", average)
        if ended is None:
            self._owner.metrics.count("generated_tokens_total", self._tokens)
            return self._piece(tokens=self._tokens, finish="tool_calls" if self._tools else "stop")
        new, finish = ended
        text = self._owner.tokenizer.decode(new, skip_special_tokens=self._job.skip_special_tokens)
        if self._job.forced_tool:
            return self._forced(text, finish)
        rest, reasoning, late = "", "", list[tuple[int, ToolCall]]()
        if self._parser is not None:
            for item in self._final_items():
                if isinstance(item, ToolCall) and not (self._job.single_tool and self._tools):
                    late.append((self._tools, item))
                    self._tools += 1
                elif isinstance(item, ReasoningText):
                    reasoning += item
                elif isinstance(item, str) and not self.stopped:
                    rest += self._stops.feed(item)
        elif text.startswith(self._seen):  # the decoder withholds an incomplete last character
            rest = self._stops.feed(text[len(self._seen) :])
        rest += "" if self.stopped else self._stops.held
        finish = "tool_calls" if self._tools else "stop" if self.stopped else finish
        return self._piece(content=rest, reasoning=reasoning, tool_calls=late, tokens=self._tokens, finish=finish)

    def _final_items(self) -> list[Any]:
        assert self._parser is not None
        try:
            _, events = self._parser.finalize()
        except (ValueError, RuntimeError):  # it ended within a tool call
            return []
        return response_events_to_chunks(events)

    def _forced(self, text: str, finish: str) -> Answer:
        """The tool call that the text is; the text itself if it was cut off."""
        try:
            call = json.loads(text)
            tool = ToolCall(call["name"], json.dumps(call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return self._piece(content=text, tokens=self._tokens, finish=finish)
        return self._piece(tool_calls=[(0, tool)], tokens=self._tokens, finish="tool_calls")
