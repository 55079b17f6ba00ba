"""Limits on the size of the running batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LEAST_COLUMNS = 64
"""Minimum number of spare columns in the cache, beyond the longest row."""
DEFAULT_DRAFTED = 4
"""Drafted tokens of a row in one step by a model, if no number is given."""
DRAFTED_BY_HEADS = 1
"""Drafted tokens of a row in one step by MTP heads, if no number is given. Published heads learn to predict one."""
MOST_DRAFTED = LEAST_COLUMNS // 2
"""Maximum drafted tokens of a row in one step. They are computed in the spare columns."""
PADDED = 1.5
"""Limit on the padding of prompts that one step computes together: padded tokens per prompt token."""


@dataclass(frozen=True)
class BatchLimits:
    """Limits of the running batch, equal on all ranks.

    Attributes:
        rows: maximum number of rows that are decoded together; 1 computes calls one after another.
        length: maximum tokens of a row, prompt and answer together. Of an encoder-decoder, each of them.
        chunk: tokens of a prompt that are computed in one step.
        reuse: prompts reuse the keys and values of prefixes that were computed before.
        drafted: maximum drafted tokens of a row in one step; 0 turns speculation off.
        draft_model: directory or name of the model that drafts them; empty for prompt lookup or heads.
        by_heads: the MTP heads of the model draft them.
        has_states: blocks of the model keep states of a row. Padding would change a state, and a state covers all
            tokens of its row, so a prompt reuses whole rows only.
        pads: prompts of different lengths are computed together.
        splits: prompts are computed in chunks. Otherwise a step computes the whole prompt, however long it is.
    """

    rows: int = 8
    length: int = 4096
    chunk: int = 256
    reuse: bool = True
    drafted: int = 0
    draft_model: str = ""
    by_heads: bool = False
    has_states: bool = False
    pads: bool = True
    splits: bool = True

    @property
    def padding(self) -> float:
        """Limit on padding, see `PADDED`."""
        return 1.0 if self.has_states or not self.pads else PADDED

    @property
    def step_bytes(self) -> int:
        """Maximum bytes of an encoded `Step`."""
        # a chunk contains whole images
        return 8 * ((8 + self.drafted) * self.rows + max(self.chunk, self.length) + 32)


DEFAULT_LIMITS = BatchLimits()
GPU_LIMITS = BatchLimits(rows=64, chunk=2048)
"""The defaults on GPUs, which compute many rows in the time of a few."""
MOST_CACHE = 16 << 30
"""Maximum bytes of keys and values on each GPU with the default number of rows."""


def check_drafted(count: Any) -> None:
    """Raise ``ValueError`` if ``count`` is no number of drafted tokens."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DRAFTED:
        raise ValueError(f"speculative_tokens must be from 1 to {MOST_DRAFTED}, or left out for none; got {count!r}")


def columns(length: int) -> int:
    """Return the number of cache columns for rows of ``length`` tokens. With spare columns, rows rarely move."""
    return length + max(LEAST_COLUMNS, length // 8)
