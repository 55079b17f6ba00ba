"""What the ranks compute together in one step of the running batch, as the leader plans it."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple


class WholePrompt(NamedTuple):
    """A prompt that is computed in one step, and whose row joins.

    Attributes:
        number: of the call that it is from.
        length: its tokens.
        displaced: the slot to which the former row moves that is in the slot of the new one; -1: it is lost.
    """

    number: int
    length: int
    displaced: int


@dataclass(slots=True)
class Step:
    """One step: rows leave; a token of every row is decoded, or prompts are computed.

    These are several short ones as a whole, or a chunk of one that is long, or begins with tokens of a row.

    Attributes:
        consumed: messages of the application that the leader has taken since the batch began to run. Each rank has the
            same messages in the same order; a follower catches up, and so takes part in calls between two steps.
        idle: no row is left in any group: the ranks go back to waiting for messages.
        reset: a step has failed: all rows are gone.
        leaving: slots to be freed one after the other; the last row moves into the slot that becomes free.
        tokens: the newest token of each row.
        whole: the prompts that are computed as a whole; their rows take the slots after the last.
        chunk: tokens of the prompt that is being computed, or of all of ``whole``, one after the other.
        begins: the chunk is the first one of its prompt.
        joins: it is the last one; the prompt's row takes the slot after the last.
        number: of the call that the prompt is from.
        source: the slot of a row, or former row, whose first tokens are also those of a prompt that begins.
        reused: so many of them; the chunk comes after them.
        displaced: as in `WholePrompt`.
        group: the group of slots that all of this is about.
    """

    consumed: int
    idle: bool = False
    reset: bool = False
    leaving: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    whole: list[WholePrompt] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    begins: bool = False
    joins: bool = False
    number: int = 0
    source: int = 0
    reused: int = 0
    displaced: int = -1
    group: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and positions that are computed; the rows are 0 if nothing is."""
        if self.whole:
            return len(self.whole), max(prompt.length for prompt in self.whole)
        return (1, len(self.chunk)) if self.chunk else (len(self.tokens), 1)

    @property
    def joining(self) -> int:
        """How many rows join."""
        return len(self.whole) or int(self.joins)

    def encode(self) -> bytes:
        """As bytes, with a checksum."""
        flags = self.idle | self.reset << 1 | self.begins << 2 | self.joins << 3
        counts = (len(self.leaving), len(self.tokens), len(self.whole))
        head = (self.consumed, flags, self.number, *counts, self.source, self.reused, self.displaced, self.group)
        whole = [value for prompt in self.whole for value in prompt]
        data = array("q", (*head, *self.leaving, *self.tokens, *whole, *self.chunk)).tobytes()
        return zlib.crc32(data).to_bytes(8, "little") + data

    @classmethod
    def decode(cls, data: bytes) -> Step | None:
        """The inverse of `encode`; ``None`` if the checksum is that of other data."""
        if zlib.crc32(data[8:]) != int.from_bytes(data[:8], "little"):
            return None
        values = iter(array("q", data[8:]).tolist())

        def take(count: int) -> list[int]:
            return list(islice(values, count))

        consumed, flags, number, leaving, tokens, whole, *prefix = take(10)
        lists = (take(leaving), take(tokens), [WholePrompt(*take(3)) for _ in range(whole)], list(values))
        flag = (bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8))
        return cls(consumed, flag[0], flag[1], *lists, flag[2], flag[3], number, *prefix)
