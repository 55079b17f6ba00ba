"""Drafts with known mistakes, in place of prompt lookup."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from oslo_models.deploy.running_batch.speculation import Drafts


class Guesses(Drafts):
    """Drafts the right next tokens of each row, and some wrong ones among them.

    Args:
        answer: returns all new tokens of a row.
        wrong: probability of a mistake in a drafted token.
        full: draft as many tokens as allowed in every step; otherwise, any number, and none in some steps.

    Attributes:
        widths: the longest draft of each step.
    """

    def __init__(
        self, most: int, rng: random.Random, answer: Callable[[Any], list[int]], wrong: float = 0.3, full: bool = False
    ) -> None:
        super().__init__(most)
        self._rng, self._answer, self._wrong, self._full = rng, answer, wrong, full
        self.widths: list[int] = []

    def propose(self, rows: Sequence[Any], most: Sequence[int]) -> list[list[int]]:
        most = most if self._full or self._rng.random() < 0.8 else [0] * len(rows)
        drafts = [self._guess(row, count) if count > 0 else [] for row, count in zip(rows, most, strict=True)]
        self.widths.append(max(map(len, drafts), default=0))
        return drafts

    def _guess(self, row: Any, most: int) -> list[int]:
        count = most if self._full or self._rng.random() < 0.5 else self._rng.randint(0, most)
        right = self._answer(row)[len(row.new) :][:count]
        return [self._rng.randrange(3, 101) if self._rng.random() < self._wrong else token for token in right]
