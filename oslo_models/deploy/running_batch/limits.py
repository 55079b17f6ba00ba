"""How large the running batch may become."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchLimits:
    """Limits of the running batch, equal on all ranks.

    Attributes:
        rows: that are decoded at once; 1: calls are computed one after another.
        length: tokens of a row, prompt and answer together.
        chunk: tokens of a prompt that are computed in one step.
        reuse: prompts take over the keys and values of prefixes that were computed before.
    """

    rows: int = 8
    length: int = 4096
    chunk: int = 256
    reuse: bool = True

    @property
    def step_bytes(self) -> int:
        """That tell the ranks about one step, at most."""
        return 8 * (5 * self.rows + self.chunk + 16)


DEFAULT_LIMITS = BatchLimits()
