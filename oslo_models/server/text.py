"""Incremental detokenization, and the search for stop strings."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

_MOST_PENDING = 16
"""Limit of pending tokens without text. The limit keeps decoding linear."""
_CONTEXT = 8
"""Number of prompt tokens to decode together with an answer. A character has at most four tokens."""
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def prompt_context(tokenizer: Any, prompt: Sequence[int], skip_special_tokens: bool = True) -> list[int]:
    """Return the last tokens of a prompt, which affect the decoding of its continuation.

    Many tokenizers write the first token of a text without its leading space. Return an empty list if the prompt has no
    text, or ends inside a character.
    """
    for context in (list(prompt[-_CONTEXT:]), list(prompt)):
        if text := tokenizer.decode(context, skip_special_tokens=skip_special_tokens):
            return [] if text.endswith(_INCOMPLETE) else context
    return []


def decode_after(tokenizer: Any, context: Sequence[int], tokens: Sequence[int], skip_special_tokens: bool) -> str:
    """Return the text that tokens add to their context."""
    whole = tokenizer.decode([*context, *tokens], skip_special_tokens=skip_special_tokens)
    if not context:
        return whole
    before = tokenizer.decode(list(context), skip_special_tokens=skip_special_tokens)
    if whole.startswith(before):
        return whole[len(before) :]
    same = (one == other for one, other in zip(before, whole, strict=False))
    return whole[sum(takewhile(bool, same)) :]


class TokenDecoder:
    """Decodes tokens one by one, with any transformers tokenizer.

    Decodes a window of the last tokens with and without the new tokens, and returns the difference. Unlike the
    ``DecodeStream`` of tokenizers, it accepts tokens that change the text before them, such as a part of a character
    after other byte tokens.

    Args:
        context: tokens before the first. The text begins after them.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        # transformers' wrapper takes longer than the tokenizer itself, and adds nothing without this option
        direct = hasattr(tokenizer, "_tokenizer") and not tokenizer.clean_up_tokenization_spaces
        decode = tokenizer._tokenizer.decode if direct else tokenizer.decode
        self._decode: Callable[[list[int]], str] = partial(decode, skip_special_tokens=skip_special_tokens)
        self._ids = list(context)
        self._passed = len(context)  # number of tokens in the window that have been returned as text
        self._before = self._decode(self._ids)

    def step(self, token: int) -> str:
        """Return the text that a token completes; empty while a character is incomplete."""
        self._ids.append(token)
        now = self._decode(self._ids)
        pending = len(self._ids) - self._passed
        if pending < _MOST_PENDING and (len(now) <= len(self._before) or now.endswith(_INCOMPLETE)):
            return ""
        text = now[len(self._before) :]
        del self._ids[: self._passed]
        self._passed = len(self._ids)
        self._before = self._decode(self._ids)
        return text


class StopAutomaton:
    """Finds stop strings in time linear in the text, for any number of stop strings. Several texts can share it.

    State 0 is the start.

    Source: Aho and Corasick, Efficient string matching, Communications of the ACM 18 (6), 1975.

    Attributes:
        depth: by state, the number of last characters of the text that may begin a stop string.
        found: by state, the length of the longest stop string that ends there, or 0.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self.depth, self.found = [0], [0]
        for stop in filter(None, stops):
            self._add(stop)
        self._fall = self._fallbacks()

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self.depth.append(self.depth[state] + 1)
                self.found.append(0)
            state = self._next[state][char]
        self.found[state] = len(stop)

    def _fallbacks(self) -> list[int]:
        """Return the state of the longest proper suffix, by state."""
        fall, left = [0] * len(self._next), deque(self._next[0].values())
        while left:
            state = left.popleft()
            self.found[state] = self.found[state] or self.found[fall[state]]
            for char, following in self._next[state].items():
                back = fall[state]
                while back and char not in self._next[back]:
                    back = fall[back]
                fall[following] = self._next[back].get(char, 0)
                left.append(following)
        return fall

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while state and char not in self._next[state]:
            state = self._fall[state]
        return self._next[state].get(char, 0)


class StopStrings:
    """Passes text on up to the first stop string. Holds back the end of a text if it may begin a stop string.

    The first stop string is the first to be complete, so the result does not depend on the pieces of the text. If
    several end at the same character, the longest counts.

    Attributes:
        hit: a stop string has been found.
        held: the text held back.
    """

    def __init__(self, automaton: StopAutomaton) -> None:
        self.hit, self.held = False, ""
        self._automaton, self._state = automaton, 0

    def feed(self, text: str) -> str:
        """Add text. Return the text that can be passed on."""
        state, held, step, found = self._state, self.held, self._automaton.step, self._automaton.found
        for at, char in enumerate(text, 1):
            state = step(state, char)
            if found[state]:
                self.hit, self.held = True, ""
                return (held + text[:at])[: -found[state]]
        self._state, whole = state, held + text
        passed = len(whole) - self._automaton.depth[state]
        self.held = whole[passed:]
        return whole[:passed]
