"""Limits on the size of the running batch."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_COLUMNS = 64
"""Minimum number of spare columns in the cache, beyond the longest row."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of the running batch, equal on all ranks.

    Attributes:
        rows: maximum number of rows that are decoded together; 1 computes calls one after another.
        length: maximum tokens of a row, prompt and answer together.
        chunk: tokens of a prompt that are computed in one step.
        reuse: prompts reuse the keys and values of prefixes that were computed before.
    """

    rows: int = 8
    length: int = 4096
    chunk: int = 256
    reuse: bool = True

    @property
    def step_bytes(self) -> int:
        """Maximum bytes of an encoded `Step`."""
        return 8 * (5 * self.rows + max(self.chunk, self.length) + 32)  # a chunk contains whole images


DEFAULT_LIMITS = BatchLimits()
GPU_LIMITS = BatchLimits(rows=64, chunk=2048)
"""The defaults on GPUs, which compute many rows in the time of a few."""
MOST_CACHE = 16 << 30
"""Maximum bytes of keys and values on each GPU with the default number of rows."""


def columns(length: int) -> int:
    """Return the number of cache columns for rows of ``length`` tokens. With spare columns, rows rarely move."""
    return length + max(LEAST_COLUMNS, length // 8)
