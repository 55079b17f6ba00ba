"""Decides what each step of the running batch computes. Without I/O: it sees neither the model nor messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.step import Step, WholePrompt

PADDED = 1.5
"""Prompts that are computed together may have so many tokens with padding for each of their own."""


class Generated(Protocol):
    """What the scheduler knows of a row; `row.Row` is one."""

    number: int
    prompt: list[int]
    new: list[int]
    ended: bool
    shares: bool


@dataclass
class Scheduler:
    """First come, first served: a step computes the prompts that come next, as far as they make a chunk together.

    Prompts go first, so that their first tokens come soon, until they amount to a chunk; then all rows get a token
    before the next prompt. A longer prompt is computed by itself, a chunk in each step, and so is one that begins with
    tokens of a row, or of one before it that has yet to be computed. A row joins when its prompt is computed and leaves
    in the step after its last token. Nothing is preempted: each row that joins fits to its end.

    Args:
        slots: rows at most.
        chunk: tokens of a prompt in one step.
        prefixes: tokens that are not computed again where prompts share them; ``None``: all are.

    Attributes:
        rows: by slot.
        prompt: the row whose prompt is being computed.
        waiting: rows whose prompt comes later.
    """

    slots: int
    chunk: int
    prefixes: Prefixes | None = None
    rows: list[Any] = field(default_factory=list)
    prompt: Any = None
    waiting: deque[Any] = field(default_factory=deque)
    _done: int = 0
    _since_rows: int = 0  # tokens of prompts that were computed since the rows got a token

    @property
    def is_idle(self) -> bool:
        return not (self.rows or self.prompt or self.waiting)

    @property
    def load(self) -> int:
        """How many rows have not ended, those that wait for a slot included."""
        return sum(not row.ended for row in self.rows) + len(self.waiting) + (self.prompt is not None)

    def add(self, row: Generated) -> None:
        self.waiting.append(row)

    def reusable(self, row: Generated) -> int:
        """How many tokens of a prompt would not be computed again."""
        return self._find_prefix(row)[1]

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """End rows: those that wait leave at once, those in a slot with the next step."""
        self.waiting = deque(row for row in self.waiting if not unwanted(row))
        if self.prompt is not None and unwanted(self.prompt):
            self.prompt = None
        for row in self.rows:
            row.ended = row.ended or unwanted(row)

    def clear(self) -> None:
        """Drop everything."""
        self.rows, self.prompt = [], None
        self.waiting.clear()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Later prompts share nothing with the rows that there are or were: the model may have changed."""
        if self.prefixes is not None:
            self.prefixes.clear()
            for row in (*self.rows, *([] if self.prompt is None else [self.prompt])):
                row.shares = False

    def plan(self, consumed: int) -> Step:
        """The next step; the rows are then those that it computes.

        Args:
            consumed: see `Step`.
        """
        leaving = self._free_slots()
        if self.prompt is None and (whole := self._whole_prompts()):
            padded = len(whole) * max(len(row.prompt) for row in whole)
            return self._decode(consumed, leaving) if self._rows_wait(padded) else self._join(consumed, leaving, whole)
        begins = self.prompt is None
        prompt = self._next_prompt() if begins else self.prompt
        source = reused = 0
        if begins:
            source, reused = self._find_prefix(prompt)
            self._done = reused
        chunk = [] if prompt is None else prompt.prompt[self._done : self._done + self.chunk]
        if not chunk or self._rows_wait(len(chunk)):
            return self._decode(consumed, leaving)
        if begins:
            self.prompt = self.waiting.popleft()
        self._since_rows += len(chunk)
        self._done += len(chunk)
        step = Step(consumed, leaving=leaving, chunk=chunk, begins=begins, number=prompt.number)
        step.source, step.reused, step.joins = source, reused, self._done == len(prompt.prompt)
        if step.joins:
            step.displaced = self._take_slot(prompt)
            self.prompt = None
        return step

    def _decode(self, consumed: int, leaving: list[int]) -> Step:
        self._since_rows = 0
        return Step(consumed, leaving=leaving, tokens=[row.new[-1] for row in self.rows])

    def _join(self, consumed: int, leaving: list[int], whole: list[Any]) -> Step:
        """A step that computes prompts as a whole."""
        self._since_rows += len(whole) * max(len(row.prompt) for row in whole)
        step = Step(consumed, leaving=leaving)
        for row in whole:
            self.waiting.popleft()
            step.chunk += row.prompt
            step.whole.append(WholePrompt(row.number, len(row.prompt), self._take_slot(row)))
        return step

    def _rows_wait(self, tokens: int) -> bool:
        """Whether the rows get a token before so many more of prompts are computed."""
        return bool(self.rows) and self._since_rows + tokens > self.chunk

    def _take_slot(self, row: Any) -> int:
        """Append a row; returns where the former row goes that is in its slot."""
        displaced = -1 if self.prefixes is None else self.prefixes.displace(len(self.rows), row.prompt)
        self.rows.append(row)
        return displaced

    def _whole_prompts(self) -> list[Any]:
        """The rows that come next whose prompts are computed together; none if the first is long or has a prefix."""
        found, longest, tokens = list[Any](), 0, 0
        for row in islice(self.waiting, self.slots - len(self.rows)):
            longest, tokens = max(longest, len(row.prompt)), tokens + len(row.prompt)
            padded = longest * (len(found) + 1)
            if padded > min(self.chunk, PADDED * tokens) or self._find_prefix(row)[1]:
                break
            if self.prefixes is not None and any(self.prefixes.are_alike(row.prompt, each.prompt) for each in found):
                break
            found.append(row)
        return found

    def _find_prefix(self, prompt: Any) -> tuple[int, int]:
        if prompt is None or self.prefixes is None:
            return 0, 0
        return self.prefixes.find(prompt.prompt, map(_computed, self.rows))

    def _next_prompt(self) -> Any:
        return self.waiting[0] if self.waiting and len(self.rows) < self.slots else None

    def _free_slots(self) -> list[int]:
        leaving = []
        for slot in reversed(range(len(self.rows))):
            row = self.rows[slot]
            if row.ended:
                self.rows[slot] = self.rows[-1]
                self.rows.pop()
                leaving.append(slot)
                if self.prefixes is not None:
                    self.prefixes.keep(len(self.rows), _computed(row))
        return leaving


def _computed(row: Generated) -> list[int]:
    """The tokens of a row whose keys and values others may take over: the newest one has none yet."""
    return [*row.prompt, *row.new[:-1]] if row.shares else []
