"""Which prompts begin with tokens whose keys and values the slots of the running batch hold already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

LEAST = 8
"""Tokens that are worth a copy; all prompts share a first token or two."""


class Prefixes:
    """The tokens of former rows, by slot, as the scheduler knows them.

    A former row stays in a slot that no row has until another takes the slot; then it moves to a free one, or to that
    of the former row that was used least recently, which is lost.

    Args:
        slots: of the batch.
        least: tokens of the shortest prefix that is reused.
    """

    def __init__(self, slots: int, least: int = LEAST) -> None:
        self._slots, self._least = slots, least
        self._held: dict[int, list[int]] = {}  # the one used least recently first

    def clear(self) -> None:
        """Forget all of them."""
        self._held.clear()

    def keep(self, slot: int, tokens: list[int]) -> None:
        """A row has left; its tokens whose keys and values are computed stay in a slot."""
        self._drop_prefixes_of(tokens)
        if len(tokens) >= self._least:
            self._held[slot] = tokens

    def find(self, prompt: Sequence[int], rows: Iterable[list[int]]) -> tuple[int, int]:
        """The slot with the longest prefix of a prompt and the length of that; 0 if there is none worth it.

        The last token of the prompt is not a part of it: its logits have to be computed.

        Args:
            rows: the tokens of the rows, by slot, whose keys and values are computed.
        """
        slot, longest = 0, 0
        for other, tokens in (*enumerate(rows), *self._held.items()):
            shared = _shared(prompt[:-1], tokens)
            if shared > longest:
                slot, longest = other, shared
        if longest < self._least:
            return 0, 0
        if slot in self._held:
            self._held[slot] = self._held.pop(slot)
        return slot, longest

    def are_alike(self, prompt: Sequence[int], other: Sequence[int]) -> bool:
        """Whether a prompt would take over tokens of another if that were computed."""
        return _shared(prompt[:-1], other) >= self._least

    def displace(self, slot: int, tokens: list[int]) -> int:
        """A row with such tokens takes a slot: where the former row that is in it moves; -1: it is lost, or none is."""
        self._drop_prefixes_of(tokens)
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

    def _without(self, slot: int) -> list[tuple[int, list[int]]]:
        return [(other, kept) for other, kept in self._held.items() if other != slot]

    def _drop_prefixes_of(self, tokens: list[int]) -> None:
        """Forget former rows all of whose tokens another row has now."""
        self._held = {slot: kept for slot, kept in self._held.items() if kept != tokens[: len(kept)]}


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
