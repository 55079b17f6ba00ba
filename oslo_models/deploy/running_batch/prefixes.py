"""Prefix reuse: finds prompts that begin with tokens already in the key-value cache of the running batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

LEAST = 8
"""Shortest prefix that is worth a copy, in tokens. All prompts share a first token or two."""


class Prefixes:
    """The scheduler's record of the tokens of former rows, by slot.

    A former row stays in its slot until a new row takes the slot. Then it moves to a free slot. If no slot is free, it
    replaces the least recently used former row.

    A prompt reuses rows of its own tenant only. Otherwise, the time to its first token would show what others asked.

    Args:
        slots: of the batch.
        least: length of the shortest reused prefix in tokens.
        is_exact: a prompt reuses all tokens of a row, or none; see `BatchLimits.has_states`.
    """

    def __init__(self, slots: int, least: int = LEAST, is_exact: bool = False) -> None:
        self._slots, self._least, self.is_exact = slots, least, is_exact
        self._held: dict[int, _Former] = {}  # least recently used first

    def clear(self) -> None:
        """Forget all former rows."""
        self._held.clear()

    def keep(self, slot: int, tokens: list[int], tenant: int = 0) -> None:
        """Keep the tokens of a row that has left. Their keys and values stay in the slot."""
        self._drop_prefixes_of(tokens, tenant)
        if len(tokens) >= self._least:
            self._held[slot] = _Former(tokens, tenant)

    def find(self, prompt: Sequence[int], rows: Iterable[list[int]], tenant: int = 0) -> tuple[int, int]:
        """Return the slot with the longest prefix of a prompt, and its length; length 0 if no prefix is long enough.

        The prefix never includes the last token of the prompt, because its logits have to be computed.

        Args:
            rows: the tokens of each row, by slot, with computed keys and values; empty for rows of other tenants.
            tenant: of the prompt.
        """
        slot, longest = 0, 0
        own = ((other, former.tokens) for other, former in self._held.items() if former.tenant == tenant)
        for other, tokens in (*enumerate(rows), *own):
            shared = self._reusable(prompt, tokens)
            if shared > longest:
                slot, longest = other, shared
        if longest < self._least:
            return 0, 0
        if slot in self._held:
            self._held[slot] = self._held.pop(slot)
        return slot, longest

    def are_alike(self, prompt: Sequence[int], other: Sequence[int]) -> bool:
        """Return whether a prompt could reuse a prefix of another prompt, once that one is computed."""
        return self._reusable(prompt, other) >= self._least

    def _reusable(self, prompt: Sequence[int], tokens: Sequence[int]) -> int:
        """Return the number of tokens of a row that a prompt can reuse."""
        shared = _shared(prompt[:-1], tokens)
        return 0 if self.is_exact and shared < len(tokens) else shared

    def displace(self, slot: int, tokens: list[int], tenant: int = 0) -> int:
        """Give a slot to a new row. Return the new slot of the former row in it; -1 if it is dropped or absent."""
        self._drop_prefixes_of(tokens, tenant)
        moved = self._held.get(slot)
        if moved is None:
            return -1
        free = (other for other in range(slot + 1, self._slots) if other not in self._held)
        target = next(free, next(iter(self._held)))
        if target != slot:
            self._held = {target if other == slot else other: kept for other, kept in self._without(target)}
            return target
        del self._held[slot]
        return -1

    def _without(self, slot: int) -> list[tuple[int, _Former]]:
        return [(other, kept) for other, kept in self._held.items() if other != slot]

    def _drop_prefixes_of(self, tokens: list[int], tenant: int) -> None:
        """Forget former rows that a row with ``tokens`` replaces."""
        self._held = {slot: kept for slot, kept in self._held.items() if not self._replaces(tokens, tenant, kept)}

    def _replaces(self, tokens: list[int], tenant: int, kept: _Former) -> bool:
        """Return whether every prompt that can reuse a former row can reuse ``tokens``, too."""
        replaced = tokens if self.is_exact else tokens[: len(kept.tokens)]
        return kept == (replaced, tenant)


class _Former(NamedTuple):
    tokens: list[int]
    tenant: int


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
