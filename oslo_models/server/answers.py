"""Answers to requests for text, whole or in pieces, and their format in OpenAI's API."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers.cli.serving.utils import ToolCall

from oslo_models.deploy.decoding import Scored
from oslo_models.server.token_texts import TokenText, TokenTexts


@dataclass(frozen=True)
class TokenScore:
    """A token of an answer with its log-probability.

    Attributes:
        token: the text and bytes of the token.
        offset: number of characters of the answer before the token.
        top: the most probable tokens at this position, best first.
    """

    token: TokenText
    logprob: float
    offset: int
    top: Sequence[tuple[TokenText, float]]

    @classmethod
    def of(cls, scored: Scored, offset: int, texts: TokenTexts) -> TokenScore:
        return cls(texts[scored.token], scored.logprob, offset, [(texts[token], value) for token, value in scored.top])

    def top_by_text(self) -> dict[str, float]:
        """Return the format of completions, always with the sampled token. Of equal texts, the most probable counts."""
        found = {token.text: _number(value) for token, value in reversed(self.top)}
        return {**found, self.token.text: _number(self.logprob)}


@dataclass
class Answer:
    """A complete answer, or a piece of an answer. Only the last piece has ``tokens`` and ``finish``."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[tuple[int, ToolCall]] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    tokens: int = 0
    finish: str | None = None

    def add(self, piece: Answer) -> None:
        """Append a piece."""
        self.content += piece.content
        self.reasoning += piece.reasoning
        self.tool_calls += piece.tool_calls
        self.scores += piece.scores
        self.tokens, self.finish = piece.tokens, piece.finish


def completion_choice(answer: Answer, logprobs: int | None) -> dict[str, Any]:
    """Return the text and log-probabilities of a choice of ``/v1/completions``."""
    if logprobs is None:
        return {"text": answer.content, "logprobs": None}
    rows = answer.scores
    scores = {
        "tokens": [row.token.text for row in rows],
        "token_logprobs": [_number(row.logprob) for row in rows],
        "top_logprobs": [row.top_by_text() for row in rows] if logprobs else None,
        "text_offset": [row.offset for row in rows],
    }
    return {"text": answer.content, "logprobs": scores}


def chat_choice(answer: Answer, delta: bool, first: bool, logprobs: int | None) -> dict[str, Any]:
    """Return the message of a choice of ``/v1/chat/completions``, or its next piece."""
    message: dict[str, Any] = {"role": "assistant"} if first else {}
    message["content"] = answer.content if answer.content or not answer.tool_calls else None
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [
            {"index": index, "id": f"call_{uuid.uuid4().hex[:16]}", "type": "function", "function": vars(call)}
            for index, call in answer.tool_calls
        ]
    scores = None
    if logprobs is not None:
        rows = [
            {**_score(row.token, row.logprob), "top_logprobs": [_score(token, value) for token, value in row.top]}
            for row in answer.scores
        ]
        scores = {"content": rows, "refusal": None}
    return {"delta" if delta else "message": message, "logprobs": scores}


def _score(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": _number(logprob), "bytes": list(token.bytes)}


def _number(logprob: float) -> float:
    """Clamp a log-probability to -9999 as OpenAI does, because JSON has no infinity."""
    return max(logprob, -9999.0)


def tally(prompts: Sequence[Sequence[int]], answers: Sequence[int]) -> dict[str, int]:
    asked, new = sum(map(len, prompts)), sum(answers)
    return {"prompt_tokens": asked, "completion_tokens": new, "total_tokens": asked + new}


def event(content: Any) -> str:
    """Format a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"
