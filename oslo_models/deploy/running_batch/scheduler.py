"""Decides what each step of the running batch computes. Without I/O: it sees neither the model nor messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.step import Step


class Generated(Protocol):
    """What the scheduler knows of a row; `row.Row` is one."""

    number: int
    prompt: list[int]
    new: list[int]
    ended: bool
    shares: bool


@dataclass
class Scheduler:
    """First come, first served: prompts are computed one after the other, a chunk in each step.

    Prompts go first, so that their first tokens come soon, until they amount to a chunk; then all rows get a token
    before the next prompt. A row joins when its prompt is computed and leaves in the step after its last token. Nothing
    is preempted: each row that joins fits to its end.

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
        leaving, begins = self._free_slots(), self.prompt is None
        prompt = self._next_prompt() if begins else self.prompt
        source = reused = 0
        if begins:
            source, reused = self._find_prefix(prompt)
            self._done = reused
        chunk = [] if prompt is None else prompt.prompt[self._done : self._done + self.chunk]
        if not chunk or (self.rows and self._since_rows + len(chunk) > self.chunk):
            self._since_rows = 0
            return Step(consumed, idle=self.is_idle, leaving=leaving, tokens=[row.new[-1] for row in self.rows])
        if begins:
            self.prompt = self.waiting.popleft()
        self._since_rows += len(chunk)
        self._done += len(chunk)
        step = Step(consumed, leaving=leaving, chunk=chunk, begins=begins, number=prompt.number)
        step.source, step.reused, step.joins = source, reused, self._done == len(prompt.prompt)
        if step.joins:
            if self.prefixes is not None:
                step.displaced = self.prefixes.displace(len(self.rows), prompt.prompt)
            self.rows.append(prompt)
            self.prompt = None
        return step

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
