"""Drafts by the multi-token prediction heads of the model itself, on every rank.

A step has placeholders in place of drafted tokens, and each rank fills them in before it computes the step: the first
head predicts a token from the hidden state before the row's newest token and from that token, then another one from its
own hidden state and the drafted token, and so on. The keys and values of the head are one more layer of the batch's
cache. After each forward of the model, the head computes them again from the hidden states of the model, so that
drafted tokens leave none of theirs.

The heads are on the last pipeline stage. It broadcasts the drafted tokens, since the first stage embeds them.

Legend:
    B: rows.
    L: positions.
    D: hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.speculation import Acceptance, Drafts
from oslo_models.distributed.collectives import broadcast
from oslo_models.pipeline.stage_runner import OtherStageError

UNKNOWN = -1
"""Placeholder of a drafted token."""


class HeadDrafts(Drafts):
    """Plans how many tokens the heads draft for each row."""

    def propose(self, rows: Sequence[Any], most: Sequence[int]) -> list[list[int]]:
        drafts = []
        for row, count in zip(rows, most, strict=True):
            row.speculation = row.speculation or Acceptance()
            drafts.append([UNKNOWN] * count if row.speculation.allows(len(row.new)) else [])
        return drafts


class HeadStates:
    """The hidden states from which the first head drafts the next tokens, on one rank.

    Args:
        model: with MTP heads.

    Attributes:
        prompt_1D: after the last computed token of the prompt in prefill.
        seen_BLD: of the last forward.
        is_shared: whether the stages have exchanged the drafts of the step in progress.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._by_slot: list[Tensor] = []  # [D] after the last token of each row with keys and values
        self._drafted_BLD: Tensor | None = None  # of a step with drafts, until it is settled
        self.prompt_1D: Tensor | None = None
        self.seen_BLD: Tensor
        self.is_shared = False

    def clear(self) -> None:
        self._by_slot, self._drafted_BLD, self.prompt_1D = [], None, None

    def free(self, slot: int) -> None:
        """See `SlotCache.free`."""
        self._by_slot[slot] = self._by_slot[-1]
        self._by_slot.pop()

    def fork(self, slot: int, count: int) -> None:
        """See `SlotCache.fork`."""
        self._by_slot += [self._by_slot[slot]] * count

    def join(self, hidden_D: Tensor) -> None:
        """Append a row."""
        self._by_slot.append(hidden_D)

    def note(self, hidden_BLD: Tensor, has_drafts: bool) -> None:
        """Note the hidden states of a decoding step, in the order of slots."""
        if has_drafts:
            self._drafted_BLD = hidden_BLD
        else:
            self._by_slot = [*hidden_BLD[:, 0]]

    def settle(self, counts: Sequence[int]) -> None:
        """Keep the hidden states of the kept tokens of a step with drafts; see `SlotCache.settle`."""
        hidden_BLD, self._drafted_BLD = self._drafted_BLD, None
        if hidden_BLD is not None:
            self._by_slot = [own_LD[max(0, count - 1)] for own_LD, count in zip(hidden_BLD, counts, strict=True)]

    def stacked(self) -> Tensor:
        """Return the hidden states [B, D] of the rows."""
        return torch.stack(self._by_slot)

    @contextmanager
    def following(
        self, cache: Any, window: int, ids_BL: Tensor, positions_BL: Tensor, mask_BL: Tensor | None, before_BD: Any
    ) -> Iterator[None]:
        """Context of a forward of the model. Afterwards, let the head compute its keys and values.

        Args:
            window: number of columns in the cache.
            before_BD: the hidden states before the first position; ``None`` for zeros.
        """
        with self._model.seeing_hidden_states() as seen:
            yield
        (self.seen_BLD,) = seen
        before_BD = torch.zeros_like(self.seen_BLD[:, 0]) if before_BD is None else before_BD
        hidden_BLD = torch.cat((before_BD[:, None], self.seen_BLD[:, :-1]), 1)
        self.compute(cache, window, ids_BL, positions_BL, mask_BL, hidden_BLD)

    def compute(
        self, cache: Any, window: int, ids_BL: Tensor, positions_BL: Tensor, mask_BL: Tensor | None, hidden_BLD: Tensor
    ) -> Tensor:
        """Return the hidden states [B, L, D] of the head. Append its keys and values to the cache.

        The first token of a row has no hidden state before it, and is masked.
        """
        if mask_BL is None:
            mask_BL = ids_BL.new_ones(len(ids_BL), window + ids_BL.shape[1])
        mask_BL = mask_BL * (mask_BL.cumsum(-1) > 1)
        found: Tensor = self._model.mtp_step(ids_BL, hidden_BLD, positions_BL, mask_BL, cache)
        return found

    def tokens(self, hidden_BD: Tensor) -> list[int]:
        """Return the drafted tokens after hidden states of the head."""
        found: list[int] = self._model.mtp_tokens(hidden_BD)
        return found

    @contextmanager
    def sharing(self, drafts: Sequence[list[int]]) -> Iterator[None]:
        """Context that fills in drafts on the last stage. Afterwards, all stages have them. A collective."""
        failure = None
        try:
            yield
        except Exception as error:  # noqa: BLE001  raised when the other stages know of it
            failure = error
        self.share(drafts, failure)
        if failure is not None:
            raise failure

    def share(self, drafts: Sequence[list[int]], failure: Exception | None = None) -> None:
        """Copy the drafts of the last stage to the other stages, in place, unless this step has done so. A collective.

        Raises:
            OtherStageError: the last stage has failed, on the other stages.
        """
        if self._model.pipeline is None or self.is_shared:
            return
        self.is_shared, axis = True, self._model.mesh.pp
        values = [*(token for draft in drafts for token in draft), failure is not None]
        sent = torch.tensor(values, dtype=torch.int64, device=self._model.device)
        *tokens, failed = broadcast(axis, sent, axis.size - 1).tolist()
        if failed and failure is None:
            raise OtherStageError("the last stage of the pipeline raised while it drafted tokens")
        remaining = iter(tokens)
        for draft in drafts:
            draft[:] = islice(remaining, len(draft))


class RemoteHeadStates(HeadStates):
    """The states on a stage without heads: empty ones, so that its rows have the places of the last stage's rows."""

    @contextmanager
    def following(self, cache: Any, window: int, ids_BL: Tensor, *_: Any) -> Iterator[None]:
        yield
        self.seen_BLD = ids_BL.new_empty(*ids_BL.shape, 0)

    def compute(self, cache: Any, window: int, ids_BL: Tensor, *_: Any) -> Tensor:
        return ids_BL.new_empty(*ids_BL.shape, 0)

    def tokens(self, hidden_BD: Tensor) -> list[int]:
        return [0] * len(hidden_BD)


def head_states(model: Any) -> HeadStates:
    """Return the states of the heads on this rank."""
    return HeadStates(model) if model.stage is None or model.stage.is_last else RemoteHeadStates(model)
