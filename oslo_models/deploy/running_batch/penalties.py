"""Penalties of tokens that occurred before, for all rows of a step together.

Legend:
    B: rows of the step.
    P: rows with penalties.
    S: slots of the table.
    L: tokens.
    V: vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.static_step import to_device


class Penalty(NamedTuple):
    """Penalties of a row. The defaults change nothing.

    Attributes:
        frequency, presence: see `oslo_models.deploy.decoding.Decoding`.
        repetition: divides positive scores of known tokens, multiplies negative ones, as in transformers.
        ignored: number of first tokens that do not count as repeated.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    ignored: int = 0


class TokenTable:
    """Tokens of the rows with penalties, in one tensor on the device. A step adds the newest ones by one launch."""

    def __init__(self) -> None:
        self._ids_SL = torch.empty(0, 0, dtype=torch.long)
        self._slots: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._written: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def penalize_(self, scores_BV: Tensor, rows: Sequence[tuple[int, Any, Penalty]]) -> None:
        """Subtract the penalties from the scores, in place.

        Args:
            rows: place in the step, `row.Row` and penalties of each row with penalties.
        """
        vocabulary, device = scores_BV.shape[1], scores_BV.device
        longest = max(row.length for _, row, _ in rows)
        self._make_room(rows, longest, vocabulary, device)
        late = [each for _, row, _ in rows for each in self._late(row)]
        settings = [
            (place, self._slots[row], row.given_BL.shape[1], *penalty) for place, row, penalty in rows
        ]  # float64 holds them exactly
        sent = to_device([*(x for each in (*settings, *late) for x in each)], device, torch.float64)
        settings_P, late_N = sent.split((len(sent) - 3 * len(late), 3 * len(late)))
        if late:
            slot_N, column_N, token_N = late_N.view(-1, 3).long().unbind(1)
            self._ids_SL.index_put_((slot_N, column_N), token_N)
        settings_P7 = settings_P.view(len(rows), 7)
        place_P, slot_P, start_P = settings_P7[:, :3].long().unbind(1)
        frequency_P1, presence_P1, repetition_P1 = settings_P7[:, 3:6].float().split(1, 1)
        ids_PL = self._ids_SL[slot_P, :longest]
        scores_PV = scores_BV[place_P]
        column_L = torch.arange(longest, device=device)
        if any(penalty.frequency or penalty.presence for _, _, penalty in rows):
            new_PL = ids_PL.masked_fill(column_L < start_P[:, None], vocabulary)
            count_PV = scores_PV.new_zeros(len(rows), vocabulary + 1)
            count_PV = count_PV.scatter_add_(1, new_PL, torch.ones_like(new_PL, dtype=scores_PV.dtype))[:, :-1]
            scores_PV = scores_PV - frequency_P1 * count_PV - presence_P1 * (count_PV > 0)
        if any(penalty.repetition != 1.0 for _, _, penalty in rows):
            known_PL = ids_PL.masked_fill(column_L < settings_P7[:, 6:], vocabulary)
            known_PV = torch.zeros(len(rows), vocabulary + 1, dtype=torch.bool, device=device)
            known_PV = known_PV.scatter_(1, known_PL, True)[:, :-1]
            changed_PV = torch.where(scores_PV < 0, scores_PV * repetition_P1, scores_PV / repetition_P1)
            scores_PV = torch.where(known_PV, changed_PV, scores_PV)
        scores_BV.index_copy_(0, place_P, scores_PV)

    def _late(self, row: Any) -> list[tuple[int, int, int]]:
        """Return slot, column and token of each token that the table lacks."""
        written, slot = self._written[row], self._slots[row]
        self._written[row] = row.length
        late = row.new[len(row.new) - (row.length - written) :] if row.length > written else ()
        return [(slot, written + place, token) for place, token in enumerate(late)]

    def _make_room(
        self, rows: Sequence[tuple[int, Any, Penalty]], longest: int, empty: int, device: torch.device
    ) -> None:
        """Give each row a slot with the tokens of its prompt. Unused columns have the token ``empty``."""
        slots, columns = self._ids_SL.shape
        new = [row for _, row, _ in rows if row not in self._slots]
        used = {slot for row, slot in self._slots.items() if not row.ended}
        needed = len(used) + len(new)
        if needed > slots or longest > columns:
            former_SL = self._ids_SL
            slots = max(slots, 2 * needed if needed > slots else 0)
            columns = max(columns, 2 * longest if longest > columns else 0)
            self._ids_SL = torch.full((slots, columns), empty, dtype=torch.long, device=device)
            if former_SL.numel():
                self._ids_SL[: former_SL.shape[0], : former_SL.shape[1]] = former_SL
        free = (slot for slot in range(slots) if slot not in used)
        for row, slot in zip(new, free, strict=False):
            length = row.given_BL.shape[1]
            self._slots[row], self._written[row] = slot, length
            self._ids_SL[slot, length:] = empty
            self._ids_SL[slot, :length] = row.given_BL[0].to(device)
