"""Decides what each step of the running batch computes. Without I/O: it sees neither the model nor messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from oslo_models.deploy.running_batch.step import Step


class Generated(Protocol):
    """What the scheduler knows of a row; `row.Row` is one."""

    number: int
    prompt: list[int]
    new: list[int]
    ended: bool


@dataclass
class Scheduler:
    """First come, first served: prompts are computed one after the other, a chunk in each step.

    Prompts go first, so that their first tokens come soon, until they amount to a chunk; then all rows get a token
    before the next prompt. A row joins when its prompt is computed and leaves in the step after its last token. Nothing
    is preempted: each row that joins fits to its end.

    Args:
        slots: rows at most.
        chunk: tokens of a prompt in one step.

    Attributes:
        rows: by slot.
        prompt: the row whose prompt is being computed.
        waiting: rows whose prompt comes later.
    """

    slots: int
    chunk: int
    rows: list[Any] = field(default_factory=list)
    prompt: Any = None
    waiting: deque[Any] = field(default_factory=deque)
    _done: int = 0
    _since_rows: int = 0  # tokens of prompts that were computed since the rows got a token

    @property
    def is_idle(self) -> bool:
        return not (self.rows or self.prompt or self.waiting)

    def add(self, row: Generated) -> None:
        self.waiting.append(row)

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

    def plan(self, consumed: int) -> Step:
        """The next step; the rows are then those that it computes.

        Args:
            consumed: see `Step`.
        """
        leaving, begins = self._free_slots(), self.prompt is None
        if begins:
            self._done = 0
        prompt = self._next_prompt() if begins else self.prompt
        chunk = [] if prompt is None else prompt.prompt[self._done : self._done + self.chunk]
        if not chunk or (self.rows and self._since_rows + len(chunk) > self.chunk):
            self._since_rows = 0
            return Step(consumed, idle=self.is_idle, leaving=leaving, tokens=[row.new[-1] for row in self.rows])
        if begins:
            self.prompt = self.waiting.popleft()
        self._since_rows += len(chunk)
        self._done += len(chunk)
        joins = self._done == len(prompt.prompt)
        if joins:
            self.rows.append(prompt)
            self.prompt = None
        return Step(consumed, leaving=leaving, chunk=chunk, begins=begins, joins=joins, number=prompt.number)

    def _next_prompt(self) -> Any:
        return self.waiting[0] if self.waiting and len(self.rows) < self.slots else None

    def _free_slots(self) -> list[int]:
        leaving = []
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].ended:
                self.rows[slot] = self.rows[-1]
                self.rows.pop()
                leaving.append(slot)
        return leaving
