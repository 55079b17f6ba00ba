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
    """First come, first served: prompts are computed one after the other, a chunk in each step, beside all rows.

    Short prompts that wait together follow each other in steps without the rows, up to a chunk in all: their first
    tokens come sooner, and rows still wait for no more than a chunk. A row joins when its prompt is computed and leaves
    in the step after its last token. Nothing is preempted: each row that joins fits to its end.

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
        leaving = self._free_slots()
        begins = self.prompt is None and bool(self.waiting) and len(self.rows) < self.slots
        if begins:
            self.prompt, self._done = self.waiting.popleft(), 0
        if self.prompt is None:
            self._since_rows = 0
            return Step(consumed, idle=self.is_idle, leaving=leaving, tokens=self._tokens())
        chunk = self.prompt.prompt[self._done : self._done + self.chunk]
        rows_wait = 0 < self._since_rows <= self.chunk - len(chunk)
        tokens = [] if rows_wait else self._tokens()
        self._since_rows = len(chunk) + (self._since_rows if rows_wait else 0)
        self._done += len(chunk)
        joins = self._done == len(self.prompt.prompt)
        number = self.prompt.number
        if joins:
            self.rows.append(self.prompt)
            self.prompt = None
        return Step(consumed, leaving=leaving, tokens=tokens, chunk=chunk, begins=begins, joins=joins, number=number)

    def _tokens(self) -> list[int]:
        return [row.new[-1] for row in self.rows]

    def _free_slots(self) -> list[int]:
        leaving = []
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].ended:
                self.rows[slot] = self.rows[-1]
                self.rows.pop()
                leaving.append(slot)
        return leaving
