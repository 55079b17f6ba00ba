"""Makes all ranks of a model stop generating at the same token, even if their clocks differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis

_OF_TOKENS = {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, ConfidenceCriteria}
"""Criteria that read only tokens and scores. These are equal on all ranks."""


class AgreedCriteria(StoppingCriteria):
    """Criteria that may differ between ranks. A sequence stops on all ranks once they stop it on one.

    Args:
        criteria: criteria that read a clock or were written by the user. A criterion with an attribute ``is_agreed``
            does not belong here, since it communicates itself.
        axis: the ranks of the model.
    """

    def __init__(self, criteria: Sequence[Any], axis: Axis) -> None:
        self.criteria, self.axis = StoppingCriteriaList(criteria), axis
        for each in criteria:
            if hasattr(each, "eos_token_id"):  # transformers pads finished rows if a criterion has it
                self.eos_token_id = each.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return a mask of finished sequences. A collective.

        Raises:
            Exception: on every rank, if a criterion raises on one.
        """
        votes = torch.zeros(len(input_ids) + 1, device=input_ids.device)
        error: Exception | None = None
        try:
            votes[:-1] = self.criteria(input_ids, scores, **kwargs)
        except Exception as raised:  # noqa: BLE001  the other ranks have to learn of it
            error, votes[-1] = raised, 1.0
        all_reduce(self.axis, votes, distributed.ReduceOp.MAX)
        if error is not None:
            raise error
        if votes[-1]:
            raise RuntimeError("a stopping criterion of generate has raised on another rank, whose error says why")
        return votes[:-1].bool()


def agreed(criteria: StoppingCriteriaList, axis: Axis) -> StoppingCriteriaList:
    """Wrap all criteria that may differ between ranks of ``axis``, with one all-reduce per token for all of them."""
    equal: list[Any] = []
    own: list[Any] = []
    for each in criteria:
        (equal if type(each) in _OF_TOKENS or getattr(each, "is_agreed", False) else own).append(each)
    return StoppingCriteriaList([*equal, AgreedCriteria(own, axis)]) if own and axis.size > 1 else criteria


def of_one_rank(criteria: Iterable[Any]) -> list[Any]:
    """Return the criteria without any exchange, for one rank that decides for the others."""
    return [own for each in criteria for own in (each.criteria if isinstance(each, AgreedCriteria) else [each])]
