"""Speculative decoding: one step computes several drafted tokens of each row, and the row keeps the right ones.

Speculative decoding: Leviathan et al., 2023; Chen et al., 2023. A row draws its next token as it would without drafts,
from the logits after its newest token. If the token equals the drafted one, the step has also computed the logits after
it, and the row draws again. So each row has the tokens that it would have without drafts, also with processors,
grammars and a seed: a drafted token is accepted with its own probability, and another token has the probability that
rejection sampling gives it.

Legend:
    B: rows.
    L: positions.
    V: vocabulary.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from torch import Tensor

from oslo_models.deploy.running_batch.static_step import to_device

SIZES = (3, 2)
"""Lengths of the token sequences that prompt lookup searches, in this order."""
WEIGHT, LEAST_ACCEPTED, RETRY, REST = 0.2, 0.15, 0.6, 32
"""Weight of the newest draft in the share of accepted tokens; the share below which a row pauses; the share after the
pause; tokens of the first pause. Each pause is twice as long as the one before."""
WITH, LEAST_WITH, WITHOUT, NEWEST = 8, 2, 3, 32
"""Before the speeds of steps are compared: drafts of rows that are timed, the minimum steps with them, and the steps
without drafts. The newest steps of each kind that count."""
LEAST_FILLED = 0.5
"""Smallest share of computed positions with tokens in a step with drafts. The others are padding."""


class Speculating(Protocol):
    """Attributes of a row that drafting uses.

    Attributes:
        keys: the tokens of the prompt; negative numbers in place of images.
        new: the generated tokens.
        room: maximum number of further tokens.
        ended: the row is complete.
        speculation: the state of drafting for this row; ``None`` before its first draft.
    """

    new: list[int]
    ended: bool
    speculation: Any

    @property
    def keys(self) -> list[int]: ...

    @property
    def room(self) -> float: ...


class PromptLookup:
    """Drafts the tokens that followed the last occurrence of a row's newest tokens in the row (Saxena, 2023)."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: dict[tuple[int, ...], int] = {}  # the index after the last occurrence of a sequence

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens of the row."""
        known = self._tokens
        for token in tokens:
            for size in SIZES:
                if len(known) >= size:
                    self._next[tuple(known[-size:])] = len(known)
            known.append(token)

    def draft(self, most: int) -> list[int]:
        """Return up to ``most`` drafted tokens. A repeated sequence goes on repeating."""
        start = next((at for size in SIZES if (at := self._next.get(tuple(self._tokens[-size:])))), None)
        if start is None:
            return []
        drafted: list[int] = []
        period = len(self._tokens) - start
        for place in range(most):
            token = self._tokens[start + place] if place < period else drafted[place - period]
            if token < 0:  # an image
                break
            drafted.append(token)
        return drafted


class Acceptance:
    """Pauses the drafts of a row if too few of its drafted tokens are accepted."""

    def __init__(self) -> None:
        self._share, self._rest, self._resumes = 1.0, REST, 0

    def allows(self, count: int) -> bool:
        """Return whether a row with ``count`` new tokens may draft."""
        return count >= self._resumes

    def note(self, drafted: int, accepted: int, count: int) -> None:
        """Note the accepted ones of drafted tokens, for a row with ``count`` new tokens since."""
        self._share += WEIGHT * (accepted / drafted - self._share)
        if self._share < LEAST_ACCEPTED:
            self._resumes, self._share = count + self._rest, RETRY
            self._rest *= 2


class Speculation:
    """The drafts of one row.

    Args:
        keys: see `Speculating`.
    """

    def __init__(self, keys: Sequence[int]) -> None:
        self._lookup, self._acceptance = PromptLookup(), Acceptance()
        self._lookup.extend(keys)
        self._prompt = len(keys)

    def draft(self, new: Sequence[int], most: int) -> list[int]:
        """Return up to ``most`` drafted tokens after the new tokens of the row."""
        self._lookup.extend(new[len(self._lookup) - self._prompt :])
        return self._lookup.draft(most) if self._acceptance.allows(len(new)) else []

    def note(self, drafted: int, accepted: int, count: int) -> None:
        """See `Acceptance.note`."""
        self._acceptance.note(drafted, accepted, count)


class DraftSpeed:
    """Pauses all drafts of a batch while steps with drafts give fewer tokens a second than steps without.

    Drafted tokens are almost free where a step waits for weights from memory, and not where it computes many rows. So
    steps are compared by their number of rows, in powers of two. The first steps are computed without drafts.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._steps: dict[tuple[int, bool], deque[tuple[int, float]]] = defaultdict(partial(deque, maxlen=NEWEST))
        self._pause: dict[int, int] = {}  # remaining steps of a pause
        self._next: dict[int, int] = defaultdict(lambda: REST)
        self._begun: tuple[float, list[Any], int] | None = None

    def allows(self, rows: Sequence[Any]) -> bool:
        """Begin to time a step. Return whether it may have drafts."""
        self.begin(rows)
        return self.decides(len(rows))

    def begin(self, rows: Sequence[Any]) -> None:
        """Begin to time a step."""
        going = [row for row in rows if not row.ended]
        self._begun = self._clock(), going, sum(len(row.new) for row in going)

    def decides(self, count: int) -> bool:
        """Return whether the next step, of ``count`` rows, may have drafts."""
        size = count.bit_length()
        plain, drafted = self._steps[size, False], self._steps[size, True]
        if self._pause.get(size):
            self._pause[size] -= 1
            return False
        trials = max(LEAST_WITH, WITH // max(1, count))
        if len(drafted) < trials or len(plain) < WITHOUT:
            return len(drafted) < trials
        if _speed(drafted) >= _speed(plain):
            return True
        self._pause[size] = self._next[size]
        self._next[size] *= 2
        drafted.clear()
        return False

    def end(self, has_drafts: bool) -> None:
        """Note the speed of the step that has begun."""
        if self._begun is None:
            return
        start, rows, before = self._begun
        self._begun = None
        gained = sum(len(row.new) for row in rows) - before
        if rows and gained:
            self._steps[len(rows).bit_length(), has_drafts].append((gained, max(self._clock() - start, 1e-9)))


class AgreedSpeed:
    """`DraftSpeed` of the leader, for all ranks: they get its decision about a step with the tokens of the step before.

    Args:
        own: times the steps of the leader; ``None`` on the other ranks.

    Attributes:
        allowed: the decision about the next step.
    """

    def __init__(self, own: DraftSpeed | None) -> None:
        self._own, self.allowed = own, True

    def allows(self, rows: Sequence[Any]) -> bool:
        """See `DraftSpeed.allows`."""
        if self._own is not None:
            self._own.begin(rows)
        return self.allowed

    def decides(self, count: int) -> bool:
        """See `DraftSpeed.decides`. ``False`` on the other ranks."""
        return self._own is not None and self._own.decides(count)

    def end(self, has_drafts: bool) -> None:
        """See `DraftSpeed.end`."""
        if self._own is not None:
            self._own.end(has_drafts)


def _speed(steps: Iterable[tuple[int, float]]) -> float:
    """Return the tokens a second of steps with these tokens and seconds.

    The number of accepted tokens is skewed, so its mean counts. The median of the seconds leaves out interruptions.
    """
    tokens, seconds = zip(*steps, strict=True)
    return statistics.mean(tokens) / statistics.median(seconds)


class Drafts:
    """The drafts of the rows in one batch, from the step that computes them to the next one.

    Args:
        most: maximum drafted tokens of a row in one step; 0 for none.
        speed: pauses drafts that take longer than they save; ``None``: rows draft however long it takes.
    """

    def __init__(self, most: int, speed: DraftSpeed | AgreedSpeed | None = None) -> None:
        self._most, self._speed = most, speed
        self._computed: list[tuple[Any, int, int]] = []  # rows with their numbers of new and of drafted tokens

    def clear(self) -> None:
        """Forget the drafts of a failed step."""
        self._computed = []

    def draft(self, rows: Sequence[Speculating]) -> list[list[int]]:
        """Return drafted tokens for each row; an empty list if the next step computes none."""
        if not self._most or not (self._speed is None or self._speed.allows(rows)):
            return []
        drafts = self.propose(rows, [0 if row.ended else int(min(self._most, row.room - 1)) for row in rows])
        positions = len(rows) + sum(map(len, drafts))
        width = 1 + max(map(len, drafts), default=0)
        if width == 1 or positions < LEAST_FILLED * len(rows) * width:
            return []
        self._computed = [(row, len(row.new), len(draft)) for row, draft in zip(rows, drafts, strict=True)]
        return drafts

    def propose(self, rows: Sequence[Speculating], most: Sequence[int]) -> list[list[int]]:
        """Return up to ``most[i]`` drafted tokens for each row."""
        drafts = []
        for row, count in zip(rows, most, strict=True):
            row.speculation = row.speculation or Speculation(row.keys)
            drafts.append(row.speculation.draft(row.new, count) if count > 0 else [])
        return drafts

    def settle(self) -> list[int]:
        """Return the number of tokens that each row has got in the step with drafts; empty if there was none."""
        counts = []
        if self._speed is not None:
            self._speed.end(bool(self._computed))
        for row, before, drafted in self._computed:
            counts.append(len(row.new) - before)
            if drafted and row.speculation is not None:
                row.speculation.note(drafted, max(0, counts[-1] - 1), len(row.new))
        self._computed = []
        return counts


AnyRow = TypeVar("AnyRow", bound=Speculating)


def going_on(
    rows: Sequence[AnyRow], logits_BLV: Tensor, drafts: Sequence[Sequence[int]]
) -> Iterator[tuple[list[int], Tensor]]:
    """Yield, for each position of a step, the indices of the rows that take a token there, and their logits [B, V].

    All rows take a token at the first position. A row takes the next one if its newest token is the drafted one.
    """
    going = list(range(len(rows)))
    for place in range(logits_BLV.shape[1]):
        logits_BV = logits_BLV[:, place]
        if len(going) < len(rows):
            logits_BV = logits_BV[to_device(going, logits_BV.device)]
        yield going, logits_BV
        going = [
            index
            for index in going
            if place < len(drafts[index]) and not rows[index].ended and rows[index].new[-1] == drafts[index][place]
        ]
        if not going:
            return
