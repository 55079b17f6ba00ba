"""Schedules the steps of the running batch. Does no I/O: it sees neither the model nor messages."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol

from typing_extensions import Self

from oslo_models.deploy.running_batch.limits import PADDED, BatchLimits
from oslo_models.deploy.running_batch.prefixes import Prefixes
from oslo_models.deploy.running_batch.speculation import Drafts
from oslo_models.deploy.running_batch.step import Step, WholePrompt


class ScheduledRow(Protocol):
    """Attributes of a row that the scheduler uses. `row.Row` implements them."""

    number: int
    prompt: list[int]
    keys: list[int]
    adapter: int
    tenant: int
    images: Any
    new: list[int]
    ended: bool
    shares: bool
    room: float
    speculation: Any


@dataclass
class Scheduler:
    """First come, first served: a step computes the next prompts in the queue, up to one chunk of tokens together.

    Prompts have priority so that their first tokens arrive soon. After a chunk of prompt tokens, all rows get a token
    before the next prompt. A prompt longer than a chunk is computed alone, one chunk per step. A prompt that shares a
    prefix with a row, or with an earlier prompt in the queue, is computed alone too, and so is a prompt with images.
    The images of each chunk are encoded in a separate step. A row joins once its prompt is computed, and leaves in the
    step after its last token. Rows are never preempted: a row joins only if the batch has room for all of its tokens.

    Args:
        slots: maximum number of rows.
        chunk: tokens of a prompt in one step.
        prefixes: shared prefixes that are not computed again; ``None`` computes every prompt in full.
        drafts: of the rows.
        padding, splits: see `BatchLimits`.

    Attributes:
        rows: by slot.
        prompt: the row in prefill.
        waiting: rows that wait for prefill.
    """

    slots: int
    chunk: int
    prefixes: Prefixes | None = None
    drafts: Drafts = field(default_factory=lambda: Drafts(0))
    padding: float = PADDED
    splits: bool = True
    rows: list[Any] = field(default_factory=list)
    prompt: Any = None
    waiting: deque[Any] = field(default_factory=deque)
    _done: int = 0
    _encoded: int = 0  # the position up to which the images of the prompt are encoded
    _since_rows: int = 0  # prompt tokens computed since the rows last got a token

    @classmethod
    def of(cls, limits: BatchLimits, prefixes: Prefixes | None, drafts: Drafts) -> Self:
        """Return the scheduler of a batch."""
        return cls(limits.rows, limits.chunk, prefixes, drafts, limits.padding, limits.splits)

    @property
    def is_idle(self) -> bool:
        return not (self.rows or self.prompt or self.waiting)

    @property
    def load(self) -> int:
        """Return the number of rows that have not ended, including rows that wait for a slot."""
        return sum(not row.ended for row in self.rows) + len(self.waiting) + (self.prompt is not None)

    def add(self, row: ScheduledRow) -> None:
        self.waiting.append(row)

    def reusable(self, row: ScheduledRow) -> int:
        """Return the number of prompt tokens that a cached prefix covers."""
        return self._find_prefix(row)[1]

    def drop(self, unwanted: Callable[[Any], bool]) -> None:
        """End rows. Waiting rows leave at once; rows in a slot leave with the next step."""
        self.waiting = deque(row for row in self.waiting if not unwanted(row))
        if self.prompt is not None and unwanted(self.prompt):
            self.prompt = None
        for row in self.rows:
            if unwanted(row):
                row.ended = True
                if self.prefixes is not None and self.prefixes.is_exact:
                    row.shares = False  # a published step may have advanced its state

    def clear(self) -> None:
        """Drop everything."""
        self.rows, self.prompt = [], None
        self.waiting.clear()
        self.drafts.clear()
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Stop prefix reuse from present and former rows, because the model may have changed."""
        if self.prefixes is not None:
            self.prefixes.clear()
            for row in (*self.rows, *([] if self.prompt is None else [self.prompt])):
                row.shares = False

    def plan(self, consumed: int) -> Step:
        """Return the next step. Afterwards `rows` holds the rows of this step.

        Args:
            consumed: see `Step`.
        """
        settled = self.drafts.settle()
        step = self._next_step(consumed)
        step.settled = settled
        return step

    def _next_step(self, consumed: int) -> Step:
        leaving = self._free_slots()
        if self.prompt is None and (whole := self._whole_prompts()):
            padded = len(whole) * max(len(row.prompt) for row in whole)
            return self._decode(consumed, leaving) if self._rows_wait(padded) else self._join(consumed, leaving, whole)
        begins = self.prompt is None
        prompt = self._next_prompt() if begins else self.prompt
        source = reused = 0
        if begins:
            source, reused = self._find_prefix(prompt)
            self._done, self._encoded = reused, 0
        chunk = [] if prompt is None else prompt.prompt[self._done : self._chunk_end(prompt)]
        # an image, or a whole prompt, may have more tokens than a chunk
        cost = min(len(chunk) + self._encoder_positions(prompt), self.chunk)
        if not chunk or self._rows_wait(cost):
            return self._decode(consumed, leaving)
        if begins:
            self.prompt = self.waiting.popleft()
        self._since_rows += cost
        step = Step(consumed, leaving=leaving, begins=begins, number=prompt.number, source=source, reused=reused)
        step.adapter = prompt.adapter
        if prompt.images is not None:
            stop, step.row = self._done + len(chunk), prompt.images.row
            images = prompt.images.between(max(self._done, self._encoded), stop)
            if begins or images[0] < images[1]:
                step.encodes, step.images, self._encoded = True, images, stop
                return step
        step.chunk = chunk
        self._done += len(chunk)
        step.joins = self._done == len(prompt.prompt)
        if step.joins:
            step.displaced = self._take_slot(prompt)
            self.prompt = None
        return step

    def _decode(self, consumed: int, leaving: list[int]) -> Step:
        self._since_rows = 0
        tokens = [row.new[-1] for row in self.rows]
        return Step(consumed, leaving=leaving, tokens=tokens, drafts=self.drafts.draft(self.rows))

    def _join(self, consumed: int, leaving: list[int], whole: list[Any]) -> Step:
        """Return a step that computes whole prompts."""
        self._since_rows += len(whole) * max(len(row.prompt) for row in whole)
        step = Step(consumed, leaving=leaving)
        for row in whole:
            self.waiting.popleft()
            step.chunk += row.prompt
            step.whole.append(WholePrompt(row.number, len(row.prompt), self._take_slot(row), row.adapter))
        return step

    def _rows_wait(self, tokens: int) -> bool:
        """Return whether the rows get a token before ``tokens`` more prompt tokens are computed."""
        return bool(self.rows) and self._since_rows + tokens > self.chunk

    def _take_slot(self, row: Any) -> int:
        """Append a row. Return the slot to which the former row in its slot moves."""
        displaced = -1 if self.prefixes is None else self.prefixes.displace(len(self.rows), row.keys, row.tenant)
        self.rows.append(row)
        return displaced

    def _whole_prompts(self) -> list[Any]:
        """Return the next rows to prefill together; none if the first prompt is long or has a cached prefix."""
        found, longest, tokens = list[Any](), 0, 0
        for row in islice(self.waiting, self.slots - len(self.rows)):
            longest, tokens = max(longest, len(row.prompt)), tokens + len(row.prompt)
            padded = longest * (len(found) + 1)
            if row.images is not None or padded > min(self.chunk, self.padding * tokens) or self._find_prefix(row)[1]:
                break
            own = [each for each in found if each.tenant == row.tenant]
            if self.prefixes is not None and any(self.prefixes.are_alike(row.keys, each.keys) for each in own):
                break
            found.append(row)
        return found

    def _find_prefix(self, prompt: Any) -> tuple[int, int]:
        if prompt is None or self.prefixes is None:
            return 0, 0
        rows = (_computed(row) if row.tenant == prompt.tenant else [] for row in self.rows)
        slot, found = self.prefixes.find(prompt.keys, rows, prompt.tenant)
        length = found if prompt.images is None else prompt.images.whole(found)
        if self.prefixes.is_exact and length < found:
            return 0, 0
        return (slot, length) if length else (0, 0)

    def _chunk_end(self, prompt: Any) -> int:
        """Return the end of the next chunk of a prompt."""
        if not self.splits:
            return len(prompt.prompt)
        if prompt.images is None:
            return self._done + self.chunk
        return int(prompt.images.chunk_end(self._done, self.chunk))

    def _encoder_positions(self, prompt: Any) -> int:
        """Return the number of encoder positions to compute beside the next tokens of a prompt."""
        return 0 if prompt is None or prompt.images is None or self._encoded else int(prompt.images.encoder_positions)

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
                    self.prefixes.keep(len(self.rows), _computed(row), row.tenant)
        return leaving


def _computed(row: ScheduledRow) -> list[int]:
    """Return the tokens of a row with reusable keys and values. The newest token has none yet."""
    return [*row.keys, *row.new[:-1]] if row.shares else []
