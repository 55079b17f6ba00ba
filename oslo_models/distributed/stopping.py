"""Makes all ranks of a model stop generating at the same token, if their clocks differ or user code raises on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    ConfidenceCriteria,
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)
from transformers.generation.streamers import BaseStreamer

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis

_OF_TOKENS = {MaxLengthCriteria, EosTokenCriteria, StopStringCriteria, ConfidenceCriteria}
"""Criteria that read only tokens and scores. These are equal on all ranks."""


_USER_CODE = ("logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria")
"""Arguments of `generate` that run code of the user, beside ``streamer``."""


class OtherRankError(RuntimeError):
    """Raised on a rank because another rank has raised. The exception of the other rank gives the reason."""


class UserErrors:
    """Errors of user code within a call of `generate`, kept until all ranks learn of them.

    If a rank raised at once, the others would wait for it in their next collective.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self.first: Exception | None = None

    def call(self, function: Callable[..., Any], *args: Any, default: Any = None, **kwargs: Any) -> Any:
        """Call user code. After an error, return ``default``."""
        if self.first is not None:
            return default
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  `vote` raises it
            self.first = error
            return default

    def vote(self, votes: Tensor) -> Tensor:
        """Return the maximum of the ranks' votes. A collective.

        Raises:
            Exception: on every rank, if user code has raised on one.
        """
        failed = 0 if self.first is None else self.axis.rank + 1
        found = all_reduce(self.axis, torch.cat((votes, votes.new_tensor([failed]))), distributed.ReduceOp.MAX)
        if self.first is not None:
            raise self.first
        if position := int(found[-1]):
            raise OtherRankError(
                f"a stopping criterion, logits processor or streamer of generate has raised on another rank, "
                f"{self.axis.ranks[position - 1]}: its error says why"
            )
        return found[:-1]

    def guarded(self, streamer: Any) -> Any:
        """Return a streamer that keeps errors."""
        return _GuardedStreamer(streamer, self)

    def processors(self, processors: LogitsProcessorList) -> LogitsProcessorList:
        """Return logits processors that keep errors."""
        return _GuardedProcessors(processors, self)


class _GuardedStreamer(BaseStreamer):
    def __init__(self, streamer: Any, errors: UserErrors) -> None:
        self._streamer, self._errors = streamer, errors

    def put(self, value: Tensor) -> None:
        if self._streamer is not None:
            self._errors.call(self._streamer.put, value)

    def end(self) -> None:
        if self._streamer is not None:
            self._errors.call(self._streamer.end)


class _GuardedProcessors(LogitsProcessorList):
    def __init__(self, processors: LogitsProcessorList, errors: UserErrors) -> None:
        super().__init__(processors)
        self._call, self._errors = processors.__call__, errors

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        processed: Tensor = self._errors.call(self._call, input_ids, scores, default=scores, **kwargs)
        return processed


def user_errors(axis: Axis, device: torch.device, given: Mapping[str, Any]) -> tuple[UserErrors | None, Any]:
    """Return the errors of a call of `generate` and its streamer. ``None`` if no rank runs user code. A collective.

    Args:
        given: the arguments of the call. Ranks may have different ones: often only one has a streamer. Then all get
            one, because transformers takes other paths with a streamer.
    """
    streamer = given.get("streamer")
    if axis.size == 1:
        return None, streamer
    streams = streamer is not None and not getattr(streamer, "is_agreed", False)
    has = [any(given.get(name) for name in _USER_CODE) or streams, streams]
    runs, streams = all_reduce(axis, torch.tensor(has, device=device).float(), distributed.ReduceOp.MAX).tolist()
    errors = UserErrors(axis) if runs else None
    return errors, errors.guarded(streamer) if errors is not None and streams else streamer


class AgreedCriteria(StoppingCriteria):
    """Criteria that may differ between ranks. A sequence stops on all ranks once they stop it on one.

    Args:
        criteria: criteria that read a clock or were written by the user. A criterion with an attribute ``is_agreed``
            does not belong here, since it communicates itself.
        errors: errors of the call on this rank.
    """

    def __init__(self, criteria: Sequence[Any], errors: UserErrors) -> None:
        self.criteria, self.errors = StoppingCriteriaList(criteria), errors
        for each in criteria:
            if hasattr(each, "eos_token_id"):  # transformers pads finished rows if a criterion has it
                self.eos_token_id = each.eos_token_id

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Return a mask of finished sequences. A collective.

        Raises:
            Exception: on every rank, if user code has raised on one.
        """
        none = torch.zeros(len(input_ids), device=input_ids.device)
        found = self.errors.call(self.criteria, input_ids, scores, default=none, **kwargs)
        return self.errors.vote(found.float()).bool()


def agreed(criteria: StoppingCriteriaList, axis: Axis, errors: UserErrors | None) -> StoppingCriteriaList:
    """Wrap all criteria that may differ between ranks of ``axis``, with one all-reduce per token for all of them.

    Args:
        errors: errors of user code in this call; ``None`` if there is none.
    """
    equal: list[Any] = []
    own: list[Any] = []
    for each in criteria:
        (equal if type(each) in _OF_TOKENS or getattr(each, "is_agreed", False) else own).append(each)
    if axis.size == 1 or not (own or errors):
        return criteria
    return StoppingCriteriaList([*equal, AgreedCriteria(own, errors or UserErrors(axis))])


def of_one_rank(criteria: Iterable[Any]) -> list[Any]:
    """Return the criteria without any exchange, for one rank that decides for the others."""
    return [own for each in criteria for own in (each.criteria if isinstance(each, AgreedCriteria) else [each])]
