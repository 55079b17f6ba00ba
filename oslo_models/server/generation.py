"""Answers of a deployed model: each is one call of `generate`, returned whole or streamed in pieces."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from oslo_models.deploy.cancellation import Cancellation
from oslo_models.deploy.grammar import Grammar, MissingVocabulary, Vocabulary
from oslo_models.server.adapter_turns import AdapterTurns
from oslo_models.server.answers import Answer
from oslo_models.server.metrics import Metrics
from oslo_models.server.response_items import ReasoningText, ToolCall
from oslo_models.server.text import decode_after
from oslo_models.server.token_reader import GenerationJob, TokenReader, TokenSource
from oslo_models.server.token_texts import TokenTexts

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment


class AnswerGenerator:
    """Generates answers in separate threads. The model batches their calls, see `deploy.running_batch`.

    Args:
        model: a deployed model.
        threads: limit of concurrent calls.
        turns: turns of the model's adapters, if a step computes one adapter only.
    """

    def __init__(
        self, model: Deployment, tokenizer: Any, threads: int, metrics: Metrics, turns: AdapterTurns | None = None
    ) -> None:
        self._turns = turns
        self.model, self.tokenizer, self.metrics = model, tokenizer, metrics
        self._threads = ThreadPoolExecutor(threads, "oslo-serve")
        ends = model.generation_config.eos_token_id
        self.ends = [] if ends is None else list(ends) if isinstance(ends, list) else [ends]
        pad = model.generation_config.pad_token_id
        self._padding = {} if pad is not None or not self.ends else {"pad_token_id": self.ends[0]}
        self._source = TokenSource(model, tokenizer, self.ends, metrics, TokenTexts(tokenizer))
        self._vocabulary: Vocabulary | None = None
        self._readers: set[TokenReader] = set()

    @property
    def waiting(self) -> int:
        """Return the number of streamed calls that the model has not started."""
        return sum(reader.waiting for reader in list(self._readers))

    @property
    def vocabulary(self) -> Vocabulary:
        """Vocabulary for grammars. Raises ``ValueError`` if grammars do not support this tokenizer."""
        if self._vocabulary is None:
            size = self.model.config.get_text_config().vocab_size
            self._vocabulary = Vocabulary.of(self.tokenizer, size, self.ends)
        return self._vocabulary

    def compiled(self, grammar: tuple[str, Any]) -> Grammar:
        """Compile a grammar of a request. Raise ``ValueError`` if it is invalid."""
        return Grammar.compiled(*grammar, self.vocabulary)

    def _generate(self, job: GenerationJob, cancellation: Cancellation, streamer: Any) -> torch.Tensor:
        """Call `generate` in this thread, at the turn of the job's adapter."""
        with contextlib.nullcontext() if self._turns is None else self._turns.turn_of(job.adapter, cancellation):
            return self._call(job, cancellation, streamer)

    def can_join(self, job: GenerationJob) -> bool:
        """Return whether the call can join the running batch."""
        return bool(self.model.can_join(**self._arguments(job)))

    def _arguments(self, job: GenerationJob) -> dict[str, Any]:
        """Return the arguments of `generate`."""
        ids_BL = torch.tensor([job.ids])
        inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL), "max_new_tokens": job.max_new_tokens}
        arguments = {**inputs, **job.media, **job.settings, **self._padding}
        if job.stop_tokens:
            arguments["eos_token_id"] = [*self.ends, *job.stop_tokens]
        if job.adapter is not None and self._turns is None:
            arguments["adapter_names"] = [job.adapter]
        return arguments

    def _call(self, job: GenerationJob, cancellation: Cancellation, streamer: Any) -> torch.Tensor:
        options = {**self._arguments(job), "streamer": streamer, "seed": job.seed, "cancellation": cancellation}
        options["tenant"] = job.tenant
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
        """Start the call. The result is [1, tokens], and includes the prompt unless the model is an encoder-decoder."""
        self.metrics.count("prompt_tokens_total", len(job.ids))
        call = partial(self._generate, job, cancellation, streamer)
        return asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _generated(self, job: GenerationJob, out_BL: torch.Tensor) -> list[int]:
        """Return the generated tokens, with a final stop token."""
        new: list[int] = out_BL[0, 1 if self.model.config.is_encoder_decoder else len(job.ids) :].tolist()
        return new

    def _ended(self, job: GenerationJob, new: list[int]) -> tuple[list[int], str]:
        """Return generated tokens without a final stop token, and the finish reason."""
        self.metrics.count("generated_tokens_total", len(new))
        if new and new[-1] in job.stop_tokens:
            return new[:-1], "stop"
        return new, "length" if len(new) >= job.max_new_tokens and new[-1] not in self.ends else "stop"

    async def answer(self, job: GenerationJob) -> Answer:
        """Return the complete answer. Cancelling the task cancels the call."""
        full = Answer()
        if job.stops is not None or job.decoding is not None:
            async with contextlib.aclosing(self.stream(job)) as pieces:
                async for piece in pieces:
                    full.add(piece)
            return full
        cancellation = Cancellation()
        try:
            generated = self._generated(job, await self.start(job, cancellation))
        except asyncio.CancelledError:
            self.metrics.count("cancelled_calls_total")
            raise
        finally:
            cancellation.cancel()
        new, full.finish = self._ended(job, generated)
        full.tokens = len(generated)
        full.content = decode_after(self.tokenizer, job.context, new, job.skip_special_tokens)
        if job.chat and (items := self._source.items(job)).parses:
            _parse(full, [*items.feed(self.tokenizer.decode(new)), *items.finish()], job.single_tool)
        return full

    async def stream(self, job: GenerationJob) -> AsyncGenerator[Answer, None]:
        """Yield the answer in pieces as it is generated. Closing the iterator cancels the call."""
        queue: asyncio.Queue[Answer | None] = asyncio.Queue()
        loop, cancellation = asyncio.get_running_loop(), Cancellation()

        def deliver(piece: Answer | None) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended with the server
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        reader = TokenReader(self._source, job, cancellation, deliver)
        self._readers.add(reader)
        result = self.start(job, cancellation, reader)
        result.add_done_callback(partial(_close, queue))
        complete = False
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            last = reader.last(None if reader.stopped else self._ended(job, self._generated(job, await result)))
            complete = True
            yield last
        finally:
            if not complete:
                self.metrics.count("cancelled_calls_total")
            self._readers.discard(reader)
            cancellation.cancel()


def _parse(full: Answer, items: list[Any], single_tool: bool) -> None:
    """Replace the text of an answer by its parsed items."""
    full.reasoning = "".join(item for item in items if isinstance(item, ReasoningText))
    full.content = "".join(item for item in items if type(item) is str)
    calls = [item for item in items if isinstance(item, ToolCall)]
    full.tool_calls = list(enumerate(calls[: 1 if single_tool else None]))
    full.finish = "tool_calls" if calls else full.finish


def _close(queue: asyncio.Queue[Answer | None], result: asyncio.Future[torch.Tensor]) -> None:
    """Mark the end of the queue after the last piece."""
    if not result.cancelled():
        result.exception()  # marks the exception as retrieved: otherwise asyncio logs it if the reader has left
    queue.put_nowait(None)
