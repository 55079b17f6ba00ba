"""How large the running batch may become."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_COLUMNS = 64
"""Columns that the cache of the batch has at least beyond those of the longest row."""


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
GPU_LIMITS = BatchLimits(rows=64, chunk=2048)
"""The defaults on GPUs, which compute many rows in the time of few."""
MOST_CACHE = 16 << 30
"""Bytes of keys and values on each GPU that the default number of rows may take."""


def columns(length: int) -> int:
    """Columns of the cache for rows of so many tokens; with the spare ones, rows move rarely."""
    return length + max(LEAST_COLUMNS, length // 8)
