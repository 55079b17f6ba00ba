"""transformers' processors that suppress tokens, with the same bits in less time.

The processors of transformers compare the whole vocabulary with the suppressed tokens at every step. Whisper suppresses
90 of 51865 tokens, which takes 3.7 ms for one row on one core of an AMD EPYC; writing to these tokens takes 0.06 ms.

Legend:
    B: rows.
    L: tokens.
    V: vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from oslo_models.contracts import broken

_PROCESSES = "transformers.generation.logits_process."
_TOKENS = {
    SuppressTokensLogitsProcessor: "suppress_tokens",
    SuppressTokensAtBeginLogitsProcessor: "begin_suppress_tokens",
}
"""By class: the attribute with the tokens."""


class Suppression:
    """Fast `SuppressTokensLogitsProcessor` or `SuppressTokensAtBeginLogitsProcessor`."""

    def __init__(self, processor: Any) -> None:
        self._processor, self._tokens = processor, getattr(processor, _TOKENS[type(processor)])
        self._at_begin = type(processor) is SuppressTokensAtBeginLogitsProcessor
        self._places: Tensor | None = None  # the tokens of the vocabulary among them

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._at_begin and input_ids.shape[-1] != self._processor.begin_index:
            return scores
        if self._places is None:
            tokens = self._tokens[(self._tokens >= 0) & (self._tokens < scores.shape[-1])]
            self._places = tokens.to(scores.device).long()
        return scores.index_fill(-1, self._places, -float("inf"))


def suppression(processor: Any) -> Any:
    """Return the fast processor of a processor that suppresses tokens; ``None`` for any other."""
    if type(processor) not in _TOKENS or broken(f"{_PROCESSES}{type(processor).__name__}.__call__") is not None:
        return None
    return Suppression(processor)
