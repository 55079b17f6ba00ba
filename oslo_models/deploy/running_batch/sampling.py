"""Draws the tokens of all rows of a step together. Each row gets the token that transformers' `generate` would draw.

Legend:
    B: rows.
    V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from oslo_models.deploy.decoding import OpenAIPenalties
from oslo_models.deploy.running_batch.penalties import Penalty, TokenTable
from oslo_models.deploy.running_batch.static_step import to_device, to_host

TOGETHER_ON = ("cuda",)
"""Devices on which the warpers run batched. On a CPU, batching takes as long as one row after the other."""
_PENALTIES = (OpenAIPenalties, RepetitionPenaltyLogitsProcessor)
_WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Warp(NamedTuple):
    """Settings of a row that are applied batched. The defaults change nothing."""

    temperature: float = 1.0
    top_k: float = float("inf")
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: Penalty = Penalty()


class CommonDraws:
    """Draws the random numbers of many rows as `generate` does: for all rows at once, ended rows included.

    Rows of equal progress get numbers of one draw. No row may be more than one token ahead of the others.

    Args:
        count: number of rows.
        generator: torch's default generator of the device.
    """

    def __init__(self, count: int, generator: torch.Generator) -> None:
        self._count, self._generator, self._drawn = count, generator, 0
        self._noise_BV: Tensor | None = None

    def next(self, number: int, place: int, scores_V: Tensor) -> Tensor:
        """Return exponentially distributed numbers, [V], of the type of the scores.

        Args:
            number: of the row.
            place: number of tokens that the row has.
        """
        if place == self._drawn:
            self._drawn += 1
            self._noise_BV = scores_V.new_empty(self._count, scores_V.shape[-1])
            self._noise_BV.exponential_(1, generator=self._generator)
        assert self._noise_BV is not None and place == self._drawn - 1
        return self._noise_BV[number]


def warp_of(processors: Sequence[Any]) -> Warp | None:
    """Return the settings of logits processors; ``None`` if `Warp` cannot express one of them."""
    order = (*_PENALTIES, *_WARPERS)
    places = [order.index(type(each)) if type(each) in order else -1 for each in processors]
    if -1 in places or places != sorted(set(places)):
        return None
    found: dict[str, float] = {}
    penalty = Penalty()
    for each in processors:
        if isinstance(each, OpenAIPenalties):
            penalty = penalty._replace(frequency=each.frequency, presence=each.presence)
        elif isinstance(each, RepetitionPenaltyLogitsProcessor):
            ignored = getattr(each, "prompt_ignore_length", None) or 0
            if not isinstance(ignored, int):
                return None
            penalty = penalty._replace(repetition=each.penalty, ignored=ignored)
        else:
            place = _WARPERS.index(type(each))
            plain = getattr(each, "filter_value", -torch.inf) == -torch.inf
            if not plain or (place > 1 and each.min_tokens_to_keep != 1):
                return None
            found[Warp._fields[place]] = getattr(each, Warp._fields[place])
    return Warp(**found, penalty=penalty)


def choose_tokens(rows: Sequence[Any], logits_BV: Tensor, table: TokenTable) -> list[int | Exception | None]:
    """Choose the next token of each row.

    Args:
        rows: each a `row.Row`.
        table: the tokens of the rows with penalties, from one step to the next.

    Returns:
        The token of each row, or the exception of its processors. ``None`` means that `Row.take` has to choose it.
    """
    if logits_BV.device.type in TOGETHER_ON:
        together = [not row.reads_scores and not row.ended for row in rows]
    else:
        together = [row.is_plain for row in rows]
    if not any(together):
        return [None] * len(rows)
    failed: dict[int, Exception] = {}
    scores_BV = logits_BV.to(torch.float32)
    if not all(row.is_plain for row, is_chosen in zip(rows, together, strict=True) if is_chosen):
        chosen = [row if is_chosen else None for row, is_chosen in zip(rows, together, strict=True)]
        scores_BV = _drawn_scores(chosen, logits_BV.to(torch.float32, copy=True), table, failed)
    best_B, token_B = scores_BV.max(-1)
    found = to_host(torch.stack((token_B, best_B.isnan()), 1)).tolist()  # the only wait for the device
    for index, (_, is_nan) in enumerate(found):
        if is_nan and together[index] and rows[index].generator is not None:
            failed.setdefault(index, RuntimeError("probability tensor contains either `inf`, `nan` or element < 0"))
    return [failed.get(index, token if together[index] else None) for index, (token, _) in enumerate(found)]


def _drawn_scores(rows: Sequence[Any], scores_BV: Tensor, table: TokenTable, failed: dict[int, Exception]) -> Tensor:
    """Return scores with the chosen token of each row as the maximum.

    ``torch.multinomial`` divides probabilities by exponentially distributed numbers and takes the largest quotient.

    Args:
        rows: ``None`` for a row without a choice here. Its scores are arbitrary.
        failed: receives exceptions of processors, by row.
    """
    for index, row in enumerate(rows):
        if row is not None and row.warp is None:
            try:
                scores_BV[index] = row.processed(scores_BV[index])
            except Exception as error:  # noqa: BLE001  fails only this row
                failed[index] = error
    warps = [Warp() if row is None or row.warp is None else row.warp for row in rows]
    penalized = [
        (index, row, warp.penalty)
        for index, (row, warp) in enumerate(zip(rows, warps, strict=True))
        if warp.penalty != Penalty()
    ]
    if penalized:
        table.penalize_(scores_BV, penalized)
    scores_BV = _warped(scores_BV, [warp._replace(penalty=Penalty()) for warp in warps])
    samples = [row is not None and row.generator is not None for row in rows]
    if not any(samples):
        return scores_BV
    noise_BV = torch.ones_like(scores_BV)
    for noise_V, row, is_sampled in zip(noise_BV, rows, samples, strict=True):
        if is_sampled:
            row.draw_(noise_V)
    if all(samples):
        return scores_BV.softmax(-1) / noise_BV
    sampled_B1 = to_device(samples, scores_BV.device)[:, None].bool()
    return torch.where(sampled_B1, scores_BV.softmax(-1) / noise_BV, scores_BV)


def _warped(scores_BV: Tensor, warps: Sequence[Warp]) -> Tensor:
    """Apply transformers' warpers to the scores of each row, in transformers' order."""
    if all(warp == Warp() for warp in warps):
        return scores_BV
    vocabulary = scores_BV.shape[-1]
    values = [(warp.temperature, min(warp.top_k, vocabulary), warp.top_p, warp.min_p) for warp in warps]
    settings = to_device(values, scores_BV.device, torch.float64)
    temperature_B1, top_k_B1, top_p_B1, min_p_B1 = settings.split(1, 1)
    scores_BV = scores_BV / temperature_B1.float()
    if all(warp._replace(temperature=1.0) == Warp() for warp in warps):
        return scores_BV
    # each warper removes the smallest scores, so the others stay in order
    sorted_BV, order_BV = scores_BV.sort(-1)
    sorted_BV = sorted_BV.masked_fill(sorted_BV < sorted_BV.gather(1, vocabulary - top_k_B1.long()), -torch.inf)
    removed_BV = sorted_BV.softmax(-1).cumsum(-1) <= (1 - top_p_B1).float()
    removed_BV[:, -1] = False
    sorted_BV = sorted_BV.masked_fill(removed_BV, -torch.inf)
    probabilities_BV = sorted_BV.softmax(-1)
    removed_BV = probabilities_BV < probabilities_BV[:, -1:] * min_p_B1.float()
    sorted_BV = sorted_BV.masked_fill(removed_BV, -torch.inf)
    return torch.empty_like(sorted_BV).scatter_(1, order_BV, sorted_BV)
