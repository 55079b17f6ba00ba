"""`SentTokens`: the tokens of hidden states that stages send. With context parallelism, a rank sends its own tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from oslo_models.cache_argument import has_cache
from oslo_models.layers.context_parts import ContextParts
from oslo_models.layers.sharded_activation import gathered
from oslo_models.pipeline.stage_runner import Batch, StageRunner


class SentTokens:
    """Converts between the tensors of a stage and the messages of this rank.

    Ranks that divide tokens hold the same stages, so each sends its own tokens of hidden states to its neighbour.
    Gradients return the same way. Further outputs of the model travel whole. Calls without gradients, calls with a
    cache and short rows have whole hidden states (`TokenDivision`).

    Args:
        runner: the local stage. The grad mode at construction is that of all micro-batches.
    """

    def __init__(self, runner: StageRunner) -> None:
        self._runner, division = runner, runner.model.token_division
        self._parts = division if isinstance(division, ContextParts) and torch.is_grad_enabled() else None

    def shape(self, batch: Batch, number: int) -> tuple[int, int, int]:
        """Return the shape of the message with this number. Every rank derives it from the batch."""
        rows, length, width = self._runner.shape(batch, number)
        parts = self._parts_of(batch, number, length)
        return rows, length if parts is None else parts.count(length), width

    def received(self, batch: Batch, messages: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the tensors of the stage for received messages."""
        tensors = dict(messages)
        for number, message in messages.items():
            length = self._runner.shape(batch, number)[1]
            if (parts := self._parts_of(batch, number, length)) is not None:
                tensors[number] = parts.part(message, length)
        return tensors

    def sent(self, batch: Batch, tensors: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the messages for tensors of the stage. A collective if they are not divided alike."""
        messages = {}
        for number, tensor in tensors.items():
            parts = self._parts_of(batch, number, tensor.shape[1])
            messages[number] = gathered(tensor) if parts is None else parts.own_tokens(tensor)
        return messages

    def _parts_of(self, batch: Batch, number: int, length: int) -> ContextParts | None:
        """Return the division of the tensor with this number, or ``None`` if it travels whole."""
        is_divided = number < len(self._runner.stage.stacks) and not has_cache(batch)
        return self._parts if self._parts is not None and is_divided and self._parts.divides(length) else None
