"""Generates for a list of prompts in one running batch, on all ranks of a model, without worker processes.

Every rank plans the same steps, since it knows all prompts and gets every token. The leader, the first rank of the last
pipeline stage, chooses the tokens and ends the rows. One small all-reduce per step shares its choice.

Equal prompts form a group. The batch computes the prompt of a group once and copies its keys, values and states to
the slots of the other rows.

Legend:
    B: rows.
    V: vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.admission import bytes_of_token, with_states
from oslo_models.deploy.running_batch.draft_model import DraftModel, SharedDrafts
from oslo_models.deploy.running_batch.head_drafts import HeadDrafts
from oslo_models.deploy.running_batch.limits import GPU_LIMITS, MOST_CACHE, BatchLimits, columns
from oslo_models.deploy.running_batch.penalties import TokenTable
from oslo_models.deploy.running_batch.plain_settings import PlainSettings
from oslo_models.deploy.running_batch.preparation import rows_of_prompt
from oslo_models.deploy.running_batch.row import Row
from oslo_models.deploy.running_batch.runners import runner_of
from oslo_models.deploy.running_batch.sampling import CommonDraws, choose_tokens
from oslo_models.deploy.running_batch.speculation import AgreedSpeed, Drafts, DraftSpeed, going_on
from oslo_models.deploy.running_batch.step import Step, WholePrompt
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.stopping import OtherRankError
from oslo_models.pipeline.sharded_model import ShardedModel

MOST_CACHE_ON_CPU = 4 << 30
"""Maximum bytes of keys and values of all ranks on CPUs, with the default number of rows."""

OnToken = Callable[[int, int, bool], Any]
"""``on_token(number of the sequence, token, whether the sequence ends with it)``."""


@dataclass
class Generated:
    """One sequence of the result.

    Attributes:
        number: in the result.
        prompt: its tokens.
        seed: of its random generator.
        adapter: see `row_adapters`.
        new: the generated tokens.
        logprobs: logarithms of the probabilities from which the tokens were drawn, if they were asked for.
        ended: the sequence is complete.
        longest: maximum number of tokens, with the prompt.
        speculation: see `Speculating`.
    """

    number: int
    prompt: list[int]
    seed: int
    adapter: int = 0
    new: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ended: bool = False
    longest: int = 0
    speculation: Any = None

    @property
    def keys(self) -> list[int]:
        return self.prompt

    @property
    def room(self) -> int:
        return self.longest - len(self.prompt) - len(self.new)


def limits_of(
    model: ShardedModel, count: int, length: int, rows: int | None, drafted: int = 0, by_heads: bool = False
) -> BatchLimits:
    """Return the limits of a batch.

    Args:
        count: number of sequences.
        length: maximum tokens of a sequence, prompt and answer together.
        rows: maximum number of rows; ``None`` for as many as the memory for keys and values allows, up to 64.
        drafted: maximum drafted tokens of a row in one step.
        by_heads: the MTP heads of the model draft them.
    """
    if rows is None:
        rows = min(count, GPU_LIMITS.rows)
        size = bytes_of_token(model.config)
        most = model.mesh.model.size * MOST_CACHE if model.device.type == "cuda" else MOST_CACHE_ON_CPU
        while size is not None and rows > 1 and rows * columns(length) * size > most:
            rows //= 2
    limits = BatchLimits(min(rows, count), length, GPU_LIMITS.chunk, reuse=False, drafted=drafted, by_heads=by_heads)
    return with_states(model.config, limits)


class Planner:
    """Plans the steps of a list of sequences. Every rank makes the same plan.

    Groups of equal prompts join in their order, each as soon as all of its rows have a slot. A step computes as many
    prompts as fit into a chunk together; a longer prompt takes several steps. In all other steps, each row decodes.

    Attributes:
        rows: the sequences in the batch, by slot.
    """

    def __init__(self, sequences: Sequence[Generated], limits: BatchLimits, drafts: Drafts | None = None) -> None:
        self._limits, self._drafts = limits, drafts or Drafts(0)
        for sequence in sequences:
            sequence.longest = limits.length
        groups: dict[tuple[int, ...], list[Generated]] = {}
        for sequence in sequences:
            groups.setdefault((sequence.adapter, *sequence.prompt), []).append(sequence)
        self._waiting = deque(
            group[start : start + limits.rows]
            for group in groups.values()
            for start in range(0, len(group), limits.rows)
        )
        self.rows: list[Generated] = []
        self._done = 0  # computed tokens of the first waiting prompt

    def next(self) -> tuple[Step, list[list[Generated]]] | None:
        """Return the next step and the groups that join in it; ``None`` at the end."""
        settled, leaving, joining = self._drafts.settle(), self._free_slots(), list[list[Generated]]()
        if found := self._next_groups():
            step, joining = self._prefill(leaving, found)
        elif self.rows:
            tokens = [row.new[-1] for row in self.rows]
            step = Step(0, leaving=leaving, tokens=tokens, drafts=self._drafts.draft(self.rows))
        else:
            return None
        step.settled = settled
        return step, joining

    def _prefill(self, leaving: list[int], found: list[list[Generated]]) -> tuple[Step, list[list[Generated]]]:
        prompt, step = found[0][0].prompt, Step(0, leaving=leaving, adapter=found[0][0].adapter)
        if self._limits.splits and len(prompt) > self._limits.chunk:
            step.chunk, step.begins = prompt[self._done : self._done + self._limits.chunk], self._done == 0
            self._done += len(step.chunk)
            step.joins = self._done == len(prompt)
            if not step.joins:
                return step, []
            self._done = 0
        else:
            for group in found:
                step.chunk += group[0].prompt
                step.whole.append(WholePrompt(0, len(group[0].prompt), -1, group[0].adapter))
        for group in found:
            self._waiting.popleft()
            self.rows.append(group[0])
        for group in found:
            self.rows += group[1:]
        return step, found

    def _next_groups(self) -> list[list[Generated]]:
        """Return the next groups to compute together. A group with a long prompt is alone."""
        found: list[list[Generated]] = []
        longest = tokens = 0
        room = self._limits.rows - len(self.rows)
        for group in islice(self._waiting, room):
            length, room = len(group[0].prompt), room - len(group)
            longest, tokens = max(longest, length), tokens + length
            padded = longest * (len(found) + 1)
            if room < 0 or (found and padded > min(self._limits.chunk, self._limits.padding * tokens)):
                break
            found.append(group)
        return found

    def _free_slots(self) -> list[int]:
        leaving = []
        for slot in reversed(range(len(self.rows))):
            if self.rows[slot].ended:
                self.rows[slot] = self.rows[-1]
                self.rows.pop()
                leaving.append(slot)
        return leaving


def leader_of(mesh: ParallelMesh) -> int:
    """Return the position of the leader among the ranks of a model."""
    return mesh.tp.size * (mesh.pp.size - 1)


class OfflineBatch:
    """The batch on one rank.

    Args:
        kwargs: arguments of `generate` for each prompt.
        keeps_logprobs: record the log-probability of each token.
        on_token: is called on this rank for each token of each sequence.
        draft_model: drafts tokens; ``None`` for prompt lookup or heads.
        common_draws: the random numbers of all rows, in place of a generator for each row.
    """

    def __init__(
        self,
        model: ShardedModel,
        limits: BatchLimits,
        kwargs: dict[str, Any],
        keeps_logprobs: bool = False,
        on_token: OnToken | None = None,
        draft_model: ShardedModel | None = None,
        common_draws: CommonDraws | None = None,
    ) -> None:
        self._model, self._limits, self._kwargs = model, limits, kwargs
        self._keeps_logprobs, self._on_token, self._common_draws = keeps_logprobs, on_token, common_draws
        self._axis = model.mesh.model
        self._leads = self._axis.rank == leader_of(model.mesh)
        self._runner = runner_of(model, limits, keeps_logits=True)
        self._settings, self._token_table = PlainSettings(model), TokenTable()
        self._rows: dict[int, Row] = {}
        self._error: Exception | None = None
        self._speed = AgreedSpeed(DraftSpeed(time.perf_counter) if limits.drafted and self._leads else None)
        self._drafts: Drafts
        if draft_model is None:
            self._drafts = (HeadDrafts if limits.by_heads else Drafts)(limits.drafted, self._speed)
        elif draft_model.mesh is not None:  # sharded over these ranks, which get the same logits
            self._drafts = DraftModel(draft_model, limits, self._speed)
        else:
            source = DraftModel(draft_model, limits) if self._leads else None
            self._drafts = SharedDrafts(limits.drafted, self._speed, source, self._exchange)

    def run(self, sequences: Sequence[Generated], on_end: Callable[[int], Any] = lambda count: None) -> None:
        """Complete the sequences. A collective of the ranks of one model.

        Args:
            on_end: is called with the number of sequences that have ended in a step.

        Raises:
            Exception: on every rank, if a processor, a criterion or ``on_token`` raises on one.
        """
        planner = Planner(sequences, self._limits, self._drafts)
        while (planned := planner.next()) is not None:
            step, groups = planned
            logits_BV = self._runner.run(step)
            if logits_BV is None:
                continue
            if groups:
                logits_BV = self._fork(planner.rows, groups, logits_BV)
            rows = planner.rows[-sum(map(len, groups)) :] if groups else planner.rows
            chosen = self._choose(rows, groups, logits_BV, step.drafts)
            self._take(rows, chosen, len(planner.rows), on_end)
        self._exchange(torch.zeros(0, dtype=torch.int64))  # for errors of `on_token` at the last tokens

    def _fork(self, rows: list[Generated], groups: list[list[Generated]], logits_BV: Tensor) -> Tensor:
        """Copy the prompts that have joined to the slots of their groups. Return the logits of all rows that join."""
        first = len(rows) - sum(map(len, groups))
        copies = [index for index, group in enumerate(groups) for _ in group[1:]]
        for index, group in enumerate(groups):
            if len(group) > 1:
                self._runner.fork(first + index, len(group) - 1)
        if not copies or not len(logits_BV):  # other stages than the last one have no logits
            return logits_BV
        return logits_BV[torch.tensor([*range(len(groups)), *copies], device=logits_BV.device)]

    def _choose(
        self, rows: list[Generated], groups: list[list[Generated]], logits: Tensor, drafts: list[list[int]]
    ) -> Tensor:
        """Choose tokens on the leader.

        Args:
            logits: [B, V], or [B, L, V] with drafts.

        Returns:
            [3, B, L]: tokens; 1 for each token that a row takes, or 2 for its last one; bits of log-probabilities.
        """
        chosen = torch.zeros(3, len(rows), 1 + max(map(len, drafts), default=0), dtype=torch.int64)
        if not self._leads or self._error is not None:
            return chosen
        try:
            for group in groups:
                self._prepare(group)
            own = [self._rows[row.number] for row in rows]
            taken: list[list[list[int]]] = torch.zeros_like(chosen[:2]).tolist()  # faster to fill than a tensor
            every = list(range(len(own)))
            for place, (going, logits_BV) in enumerate(going_on(own, logits, drafts) if drafts else [(every, logits)]):
                some = [own[index] for index in going]
                tokens = choose_tokens(some, logits_BV, self._token_table)
                for at, (index, row, token) in enumerate(zip(going, some, tokens, strict=True)):
                    if isinstance(token, Exception):
                        raise token
                    token = row.take(logits_BV[at]) if token is None else row.take_token(token)
                    taken[0][index][place], taken[1][index][place] = int(token), 1 + row.ended
                if self._keeps_logprobs:
                    last = [row.logprobs[-1] for row in some]  # type: ignore[index]
                    chosen[2, going, place] = torch.tensor(last, dtype=torch.float64).view(torch.int64)
            chosen[:2] = torch.tensor(taken)
        except Exception as error:  # noqa: BLE001  raised on all ranks by the exchange
            self._error = error
        return chosen

    def _prepare(self, group: list[Generated]) -> None:
        seeds = [(each.number, each.seed) for each in group]
        made = rows_of_prompt(
            self._model, group[0].prompt, seeds, self._kwargs, self._settings, keeps_logprobs=self._keeps_logprobs
        )
        for row in made:
            row.common_draws = None if row.generator is None else self._common_draws
            row.is_exact = getattr(self._model, "has_exact_rollouts", False)
        self._rows.update({row.number: row for row in made})

    def _take(self, rows: list[Generated], chosen: Tensor, count: int, on_end: Callable[[int], Any]) -> None:
        """Append the chosen tokens to rows, and agree on drafts in the next step, of ``count`` rows."""
        decision = chosen.new_tensor([self._speed.decides(count)])
        found = self._exchange(torch.cat((chosen.flatten(), decision)))
        self._speed.allowed = bool(found[-1])
        tokens_BL, taken_BL, bits_BL = found[:-1].view(chosen.shape)
        logprobs_BL = bits_BL.view(torch.float64)
        for row, tokens, taken, logprobs in zip(
            rows, tokens_BL.tolist(), taken_BL.tolist(), logprobs_BL.tolist(), strict=True
        ):
            for token, mark, logprob in zip(tokens, taken, logprobs, strict=True):
                if mark:
                    self._append(row, token, logprob, ends=mark == 2)
        if ended := sum(row.ended for row in rows):
            on_end(ended)

    def _append(self, row: Generated, token: int, logprob: float, ends: bool) -> None:
        row.new.append(token)
        row.ended = ends
        if self._keeps_logprobs:
            row.logprobs.append(logprob)
        if ends:
            self._rows.pop(row.number, None)
        if self._on_token is not None and self._error is None:
            try:
                self._on_token(row.number, token, ends)
            except Exception as error:  # noqa: BLE001  raised on all ranks by the next exchange
                self._error = error

    def _exchange(self, values: Tensor) -> Tensor:
        """Sum int64 values over the ranks: only the leader has other ones than zeros. Raise if a rank has failed."""
        if self._axis.size > 1:
            failed = 0 if self._error is None else self._axis.rank + 1
            sent = torch.cat((values.new_tensor([failed]), values)).to(self._model.device)
            found = all_reduce(self._axis, sent).cpu()
            failed, values = int(found[0]), found[1:]
            if failed and self._error is None:
                raise OtherRankError(
                    "a logits processor, stopping criterion or streamer of generate_batch has raised on another rank: "
                    "its error says why"
                )
        if self._error is not None:
            raise self._error
        return values
