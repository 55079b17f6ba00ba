"""What the ranks compute together in one step of the running batch, as the leader plans it."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class Step:
    """One step: rows leave; a token of every row is decoded, or a chunk of one prompt is computed and its row joins.

    Attributes:
        consumed: messages of the application that the leader has taken since the batch began to run. Each rank has the
            same messages in the same order; a follower catches up, and so takes part in calls between two steps.
        idle: no row is left: the ranks go back to waiting for messages.
        reset: the step before has failed: all rows are gone.
        leaving: slots to be freed one after the other; the last row moves into the slot that becomes free.
        tokens: the newest token of each row.
        chunk: tokens of the prompt that is being computed.
        begins: the chunk is the first one of its prompt.
        joins: it is the last one; the prompt's row takes the slot after the last.
        number: of the call that the prompt is from.
        source: the slot of a row, or former row, whose first tokens are also those of a prompt that begins.
        reused: so many of them; the chunk comes after them.
        displaced: the slot to which the former row moves that is in the slot of the row that joins; -1: it is lost.
    """

    consumed: int
    idle: bool = False
    reset: bool = False
    leaving: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    chunk: list[int] = field(default_factory=list)
    begins: bool = False
    joins: bool = False
    number: int = 0
    source: int = 0
    reused: int = 0
    displaced: int = -1

    def encode(self) -> bytes:
        """As bytes, with a checksum."""
        flags = self.idle | self.reset << 1 | self.begins << 2 | self.joins << 3
        prefix = (self.source, self.reused, self.displaced)
        head = (self.consumed, flags, self.number, len(self.leaving), len(self.tokens), *prefix)
        data = array("q", (*head, *self.leaving, *self.tokens, *self.chunk)).tobytes()
        return zlib.crc32(data).to_bytes(8, "little") + data

    @classmethod
    def decode(cls, data: bytes) -> Step | None:
        """The inverse of `encode`; ``None`` if the checksum is that of other data."""
        if zlib.crc32(data[8:]) != int.from_bytes(data[:8], "little"):
            return None
        values = array("q", data[8:]).tolist()
        consumed, flags, number, leaving, tokens, *prefix = values[:8]
        lists, first, second = values[8:], leaving, leaving + tokens
        parts = (lists[:first], lists[first:second], lists[second:])
        flag = (bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8))
        return cls(consumed, flag[0], flag[1], *parts, flag[2], flag[3], number, *prefix)
