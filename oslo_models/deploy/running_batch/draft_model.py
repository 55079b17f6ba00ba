"""Drafts by a small model of the same vocabulary, on the leader or sharded. Its key-value cache follows the rows.

Legend:
    B: rows.
    L: positions.
    V: vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.admission import with_states
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.speculation import Acceptance, AgreedSpeed, Drafts, DraftSpeed
from oslo_models.deploy.running_batch.static_step import to_device, to_host
from oslo_models.deploy.running_batch.step import Step
from oslo_models.deploy.running_batch.step_runner import StepRunner
from oslo_models.pipeline.sharded_model import ShardedModel


class DraftModel(Drafts):
    """Drafts the most probable tokens of a model.

    A row enters the model's cache when it drafts, and leaves it when it has ended or pauses. The cache then computes
    the tokens that it lacks, and drops the drafted tokens that the row has not accepted. Rows with images and rows
    beyond the positions of the model do not draft.

    Args:
        limits: of the batch.
        speed: see `Drafts`.
    """

    def __init__(self, model: ShardedModel, limits: BatchLimits, speed: DraftSpeed | AgreedSpeed | None = None) -> None:
        super().__init__(limits.drafted, speed)
        own = with_states(model.config, replace(limits, reuse=False))
        self._runner, self._chunk = StepRunner(model, own), own.chunk if own.splits else own.length
        text = model.config.get_text_config(decoder=True)
        self._positions = getattr(text, "max_position_embeddings", None) or math.inf
        self._rows: list[Any] = []  # by slot
        self._held: list[list[int]] = []  # by slot: the tokens with keys and values
        self._device, self._has_failed = model.device, False

    def clear(self) -> None:
        super().clear()
        self._runner.clear()
        self._rows, self._held = [], []

    def reserve(self) -> int:
        """Allocate the whole cache, and return its bytes; see `StepRunner.reserve`."""
        return self._runner.reserve()

    def propose(self, rows: Sequence[Any], most: Sequence[int]) -> list[list[int]]:
        counts = {id(row): self._count(row, count) for row, count in zip(rows, most, strict=True)}
        drafting = [row for row in rows if counts[id(row)] > 0]
        drafted: list[list[int]] = []
        if drafting and not self._has_failed:
            try:
                drafted = self._draft(drafting, max(counts[id(row)] for row in drafting))
            except Exception as error:  # noqa: BLE001  the rows go on without drafts
                self._has_failed = True
                self.clear()
                warnings.warn(f"the running batch drafts no tokens from now on: {error!r}", stacklevel=2)
        found = {id(row): draft[: counts[id(row)]] for row, draft in zip(self._rows, drafted, strict=False)}
        return [found.get(id(row), []) for row in rows]

    def _count(self, row: Any, most: int) -> int:
        """Return the number of tokens to draft for a row."""
        row.speculation = row.speculation or Acceptance()
        fits = len(row.prompt) + len(row.new) + self._most <= self._positions
        has_images = getattr(row, "images", None) is not None
        return most if fits and not has_images and row.speculation.allows(len(row.new)) else 0

    def _draft(self, rows: Sequence[Any], most: int) -> list[list[int]]:
        """Return ``most`` drafted tokens of each row, by slot."""
        self._drop_wrong()
        self._leave(rows)
        for row in rows:
            if not any(own is row for own in self._rows):
                self._join(row)
        late = self._catch_up()
        if any(len(tokens) > 1 for tokens in late):
            step = Step(0, tokens=[tokens[0] for tokens in late], drafts=[tokens[1:] for tokens in late])
            logits_BLV = self._run(step)
            self._runner.rows.settle([*map(len, late)])
            last = to_device([[slot, len(tokens) - 1] for slot, tokens in enumerate(late)], self._device)
            logits_BV = logits_BLV[last[:, 0], last[:, 1]]
        else:
            logits_BV = self._run(Step(0, tokens=[tokens[0] for tokens in late]))
        drafted: list[list[int]] = [[] for _ in self._rows]
        for place in range(most):
            for draft, token in zip(drafted, to_host(logits_BV.argmax(-1)).tolist(), strict=True):
                draft.append(token)
            if place + 1 < most:
                self._runner.remember_step()
                logits_BV = self._run(Step(0, tokens=[draft[-1] for draft in drafted]))
        for held, draft in zip(self._held, drafted, strict=True):
            held += draft[:-1]
        return drafted

    def _run(self, step: Step) -> Tensor:
        logits = self._runner.run(step)
        assert logits is not None
        return logits

    def _leave(self, rows: Sequence[Any]) -> None:
        """Remove the rows that do not draft."""
        for slot in reversed(range(len(self._rows))):
            if not any(self._rows[slot] is row for row in rows):
                self._runner.free([slot])
                for own in (self._rows, self._held):
                    own[slot] = own[-1]
                    own.pop()

    def _join(self, row: Any) -> None:
        """Compute the tokens of a row, except the newest one."""
        tokens = [*row.prompt, *row.new[:-1]]
        for start in range(0, len(tokens), self._chunk):
            chunk = tokens[start : start + self._chunk]
            self._runner.run(Step(0, chunk=chunk, begins=not start, joins=start + len(chunk) == len(tokens)))
        self._rows.append(row)
        self._held.append(tokens)

    def _drop_wrong(self) -> None:
        """Drop the wrong tokens from the cache."""
        wrong = []
        for row, held in zip(self._rows, self._held, strict=True):
            known = [*row.prompt, *row.new[:-1]]
            pairs = enumerate(zip(held, known, strict=False))
            right = next((place for place, (one, other) in pairs if one != other), min(len(held), len(known)))
            wrong.append(len(held) - right)
            del held[right:]
        self._runner.rows.cut(wrong)

    def _catch_up(self) -> list[list[int]]:
        """Return the tokens that the cache lacks of each row, at least its newest one."""
        late = []
        for row, held in zip(self._rows, self._held, strict=True):
            late.append([*row.prompt, *row.new][len(held) :])
            held += late[-1]
        return late


class SharedDrafts(Drafts):
    """The drafts of the leader, on every rank.

    Args:
        speed: see `Drafts`. Ranks agree on it.
        source: the leader's drafts; ``None`` on the other ranks.
        exchange: sums int64 values over the ranks. Only the leader has other ones than zeros.
    """

    def __init__(
        self, most: int, speed: AgreedSpeed, source: Drafts | None, exchange: Callable[[Tensor], Tensor]
    ) -> None:
        super().__init__(most, speed)
        self._source, self._exchange = source, exchange

    def propose(self, rows: Sequence[Any], most: Sequence[int]) -> list[list[int]]:
        sent_BL = torch.zeros(len(rows), self._most, dtype=torch.int64)
        drafts = [] if self._source is None else self._source.propose(rows, most)
        for tokens_L, draft in zip(sent_BL, drafts, strict=False):
            tokens_L[: len(draft)] = torch.tensor(draft, dtype=torch.int64) + 1  # 0 is no token
        found_BL = self._exchange(sent_BL.flatten()).view_as(sent_BL)
        return [[token - 1 for token in tokens if token] for tokens in found_BL.tolist()]
