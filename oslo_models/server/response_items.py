"""Parses the answer of a chat into text, reasoning and tool calls, in the format of the model's family."""

from __future__ import annotations

from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, build_response_parser, response_events_to_chunks

__all__ = ["ReasoningText", "ResponseItems", "ToolCall"]


class ResponseItems:
    """Items of one answer, parsed from its text with special tokens. Without a parser for the model, all is text.

    Args:
        ids: the tokens of the prompt.
        ends: the end tokens. Some parsers need them, and others treat them as text.
    """

    def __init__(self, model: Any, tokenizer: Any, ids: list[int], ends: list[int]) -> None:
        self._parser = build_response_parser(tokenizer, model, ids)
        self._ends = [text for end in ends if (text := tokenizer.decode([end]))]
        if self._parser is not None:
            self._parser.initial_events.clear()  # text of the prompt

    @property
    def parses(self) -> bool:
        return self._parser is not None

    def feed(self, text: str) -> list[Any]:
        """Return the items that this text completes. Strings are pieces of the content."""
        assert self._parser is not None
        return self._without_ends(response_events_to_chunks(self._parser.feed(text)))

    def finish(self) -> list[Any]:
        """Return the items that the end of the text completes."""
        assert self._parser is not None
        try:
            _, events = self._parser.finalize()
        except (ValueError, RuntimeError):  # the text ended inside a tool call
            return []
        return self._without_ends(response_events_to_chunks(events))

    def _without_ends(self, items: list[Any]) -> list[Any]:
        for index, item in enumerate(items):
            if type(item) is str:
                for end in self._ends:
                    items[index] = items[index].removesuffix(end)
        return items
