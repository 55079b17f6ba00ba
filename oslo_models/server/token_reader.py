"""Reads the tokens of one `generate` call as they arrive: text, reasoning, tool calls and log-probabilities."""

from __future__ import annotations

import codecs
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.decoding import Decoding, Scored
from oslo_models.server.answers import Answer, TokenScore
from oslo_models.server.response_items import ReasoningText, ResponseItems, ToolCall
from oslo_models.server.text import StopAutomaton, StopStrings, TokenDecoder, decode_after
from oslo_models.server.token_texts import TokenTexts

if TYPE_CHECKING:
    import torch

    from oslo_models.server.metrics import Metrics


@dataclass(frozen=True)
class TokenSource:
    """The model, tokenizer and metrics behind a stream of tokens.

    Attributes:
        ends: the end tokens.
        texts: the texts of single tokens.
    """

    model: Any
    tokenizer: Any
    ends: list[int]
    metrics: Metrics
    texts: TokenTexts

    def items(self, job: GenerationJob) -> ResponseItems:
        """Return the parser for the answer of a chat."""
        return ResponseItems(self.model, self.tokenizer, job.ids, self.ends)


_NO_STOPS = StopAutomaton(())


@dataclass
class GenerationJob:
    """The arguments for one `generate` call.

    Attributes:
        ids: the tokens of the prompt.
        max_new_tokens: limit of tokens in the answer.
        settings: further arguments of `generate`.
        stops: the answer ends before the first of these strings; ``None`` for no stop strings.
        stop_tokens: the answer also ends before these tokens.
        decoding: penalties, grammar and log-probabilities; ``None`` without any of them.
        chat: parse reasoning and tool calls from the text.
        forced_tool: the text is a tool call in JSON.
        single_tool: drop tool calls after the first.
        skip_special_tokens: leave special tokens out of the text.
        context: the last tokens of the prompt, if the text continues the prompt.
        adapter: the adapter's name in the model; ``None`` without an adapter.
        media: further arguments of `generate` with the images of the prompt.
        tenant: see `Deployment.generate`.
    """

    ids: list[int]
    max_new_tokens: int
    settings: dict[str, Any]
    seed: int | None
    stops: StopAutomaton | None
    stop_tokens: list[int]
    decoding: Decoding | None = None
    chat: bool = False
    forced_tool: bool = False
    single_tool: bool = False
    skip_special_tokens: bool = True
    context: list[int] = field(default_factory=list)
    adapter: str | None = None
    media: dict[str, Any] = field(default_factory=dict)
    tenant: int = 0


class TokenReader:
    """Streamer of a call: decodes its tokens in the thread of the call, and ends the call at a stop string.

    Args:
        deliver: receives the pieces of the answer.
    """

    def __init__(
        self,
        source: TokenSource,
        job: GenerationJob,
        cancellation: Cancellation,
        deliver: Callable[[Answer], object],
    ) -> None:
        self._source, self._job, self._cancellation, self._deliver = source, job, cancellation, deliver
        items = source.items(job) if job.chat and not job.forced_tool else None
        self._parser = items if items is not None and items.parses else None
        skips = job.skip_special_tokens and self._parser is None
        self._decoder = TokenDecoder(source.tokenizer, skips, job.context)
        self._stops, self._seen = StopStrings(job.stops or _NO_STOPS), ""
        self._tokens, self._tools, self._offset = 0, 0, 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._scores: list[TokenScore] = []
        self.waiting = True  # until `put` gets the first value, the prompt
        self._times = [time.monotonic()]  # the time of the request, then the time of each token

    @property
    def stopped(self) -> bool:
        """Whether the text has reached a stop string."""
        return self._stops.hit

    def put(self, value: torch.Tensor | Scored) -> None:
        if self._cancellation.cancelled:
            raise CallCancelled("the client has left")
        if self.waiting:
            self.waiting = False
            self._source.metrics.observe("queue_seconds", time.monotonic() - self._times[0])
            return
        self._times.append(time.monotonic())
        if len(self._times) == 2:
            self._source.metrics.observe("time_to_first_token_seconds", self._times[1] - self._times[0])
        tokens = [value.token] if isinstance(value, Scored) else value.tolist()
        if len(tokens) > 1:
            raise RuntimeError(f"an answer is one row of tokens, but the call computes {len(tokens)} rows")
        for token in tokens:
            self._tokens += 1
            if token in self._job.stop_tokens:
                continue
            if isinstance(value, Scored) and token not in self._source.ends:
                self._scores.append(TokenScore.of(value, self._offset, self._source.texts))
                self._offset += len(self._characters.decode(self._scores[-1].token.bytes))
            self._read(self._decoder.step(token))
        if self.stopped:
            raise CallCancelled("a stop string was generated")

    def end(self) -> None:
        """Do nothing: the rest of the text is known after the call has returned, see `last`."""

    def _read(self, text: str) -> None:
        if not text or self.stopped:
            return
        self._seen += text
        self._read_items([text] if self._parser is None else self._parser.feed(text))

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
        """Return the last piece.

        Args:
            ended: the new tokens of the call and its finish reason; ``None`` if a stop string ended the call.
        """
        if self._tokens > 1:
            average = (self._times[-1] - self._times[1]) / (self._tokens - 1)
            self._source.metrics.observe("time_per_token_seconds", average)
        if ended is None:
            self._source.metrics.count("generated_tokens_total", self._tokens)
            return self._piece(tokens=self._tokens, finish="tool_calls" if self._tools else "stop")
        new, finish = ended
        text = decode_after(self._source.tokenizer, self._job.context, new, self._job.skip_special_tokens)
        if self._job.forced_tool:
            return self._forced(text, finish)
        rest, reasoning, late = "", "", list[tuple[int, ToolCall]]()
        if self._parser is not None:
            for item in self._parser.finish():
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

    def _forced(self, text: str, finish: str) -> Answer:
        """Parse the text as a tool call. Return a truncated text as content."""
        try:
            call = json.loads(text)
            tool = ToolCall(call["name"], json.dumps(call["arguments"]))
        except (ValueError, KeyError, TypeError):
            return self._piece(content=text, tokens=self._tokens, finish=finish)
        return self._piece(tool_calls=[(0, tool)], tokens=self._tokens, finish="tool_calls")
