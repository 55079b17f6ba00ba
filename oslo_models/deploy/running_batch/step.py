"""The plan of one step of the running batch, which the leader sends to all ranks."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

MOST_FORGOTTEN = 8
"""Maximum number of forgotten calls that one step names."""


class WholePrompt(NamedTuple):
    """A prompt that is computed in one step. Its row joins in the same step.

    Attributes:
        number: of its call.
        length: in tokens.
        displaced: the slot to which the former row in the slot of the new row moves; -1 drops the former row.
        adapter: of the row, see `row_adapters`.
    """

    number: int
    length: int
    displaced: int
    adapter: int = 0


@dataclass(slots=True)
class Step:
    """One step: rows leave; then either every row decodes a token, or prompts are computed.

    Prompts are either several short whole prompts, or a chunk of one prompt that is long or has a cached prefix.

    Attributes:
        consumed: messages of the application that the leader has taken since the batch began to run. Each rank has the
            same messages in the same order. A follower catches up, and so takes part in calls between two steps.
        idle: no row is left in any group. The ranks go back to waiting for messages.
        reset: a step has failed. All rows are gone.
        other: the ranks compute the oldest call that cannot join.
        pause: the rows have had their turn. The ranks go on with the call that cannot join.
        leaving: slots to free one after the other. The last row moves into the free slot.
        tokens: the newest token of each row.
        drafts: the drafted tokens after the newest token of each row; empty if no row has any.
        settled: the number of tokens that each row got in the last step with drafts of its group; empty if that step
            is settled. It comes before ``leaving``.
        whole: the whole prompts. Their rows take the slots after the last row.
        chunk: tokens of the prompt in prefill, or of all prompts in ``whole``, concatenated.
        begins: the chunk is the first one of its prompt.
        joins: the chunk is the last one of its prompt. The prompt's row takes the slot after the last row.
        number: of the prompt's call.
        source: slot that holds the longest cached prefix of a new prompt.
        reused: length of that prefix in tokens. The chunk starts after it.
        displaced: as in `WholePrompt`.
        group: the group of slots that runs the step.
        row: index of the prompt's row in its call.
        encodes: the ranks encode images of the prompt, for its next chunk.
        images: the first of these images, and the end (exclusive).
        adapter: of the prompt that begins, see `row_adapters`.
        forgotten: calls with images that have ended before their prompts were computed, at most `MOST_FORGOTTEN`.
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
    other: bool = False
    pause: bool = False
    row: int = 0
    encodes: bool = False
    images: tuple[int, int] = (0, 0)
    forgotten: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    adapter: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """The number of computed rows and positions. There are 0 rows if the step computes nothing."""
        if self.whole:
            return len(self.whole), max(prompt.length for prompt in self.whole)
        longest_draft = max(map(len, self.drafts), default=0)
        return (1, len(self.chunk)) if self.chunk else (len(self.tokens), 1 + longest_draft)

    @property
    def joining(self) -> int:
        """The number of rows that join."""
        return len(self.whole) or int(self.joins)

    def encode(self) -> bytes:
        """Return the step as bytes, with a checksum."""
        flags = self.idle | self.reset << 1 | self.begins << 2 | self.joins << 3 | self.other << 4 | self.pause << 5
        flags |= self.encodes << 6
        counts = (len(self.leaving), len(self.tokens), len(self.whole), len(self.forgotten))
        drafts = [*map(len, self.drafts), *(token for draft in self.drafts for token in draft)]
        prefix = (self.source, self.reused, self.displaced, self.group)
        head = [self.consumed, flags, self.number, self.row, *self.images, *counts, *prefix]
        head += (len(self.drafts), len(self.settled), self.adapter)
        whole = [value for prompt in self.whole for value in prompt]
        lists = (*self.leaving, *self.tokens, *whole, *self.forgotten, *drafts, *self.settled, *self.chunk)
        data = array("q", (*head, *lists)).tobytes()
        return zlib.crc32(data).to_bytes(8, "little") + data

    @classmethod
    def decode(cls, data: bytes) -> Step | None:
        """Return the inverse of `encode`; ``None`` if the checksum does not match the data."""
        if zlib.crc32(data[8:]) != int.from_bytes(data[:8], "little"):
            return None
        values = iter(array("q", data[8:]).tolist())

        def take(count: int) -> list[int]:
            return list(islice(values, count))

        consumed, flags, number, row, first, stop, leaving, tokens, whole, gone = take(10)
        source, reused, displaced, group, drafts, settled, adapter = take(7)
        lists = (take(leaving), take(tokens), [WholePrompt(*take(4)) for _ in range(whole)])
        forgotten = take(gone)
        drafted = [take(length) for length in take(drafts)]
        kept, chunk = take(settled), list(values)
        flag = [bool(flags >> bit & 1) for bit in range(7)]
        prefix = (source, reused, displaced, group)
        step = cls(consumed, flag[0], flag[1], *lists, chunk, flag[2], flag[3], number, *prefix, flag[4], flag[5])
        step.row, step.encodes, step.images, step.forgotten = row, flag[6], (first, stop), forgotten
        step.drafts, step.settled, step.adapter = drafted, kept, adapter
        return step
