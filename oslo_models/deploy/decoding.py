"""Decoding features of deployed models beyond transformers': OpenAI's penalties, grammars and log-probabilities.

They apply to the raw logits of the model, before the temperature, top-k, top-p and min-p of `generate`. The
``logits_processor`` argument of `generate` would apply after these.

Legend:
    B: rows.
    V: vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oslo_models.deploy.grammar import Grammar
from oslo_models.sharding.model_protocol import TransformersModel

if TYPE_CHECKING:
    from torch import Tensor


class Scored(NamedTuple):
    """A token with log-probabilities. The streamer gets one per token if the request asks for log-probabilities.

    Attributes:
        token: the new token.
        logprob: natural logarithm of its probability, before the settings of the request change it.
        top: the most probable tokens with their log-probabilities, best first.
    """

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Decoding:
    """The argument ``decoding`` of `Deployment.generate`, for one row, greedy or sampled.

    Attributes:
        frequency_penalty: subtracted from the logit of a token once per earlier occurrence in the output.
        presence_penalty: subtracted once if the token occurs in the output. Both penalties follow OpenAI's definition:
            the prompt does not count.
        grammar: constrains the text.
        logprobs: number of alternatives in the `Scored` that the streamer gets for each token; ``None``: it gets
            tokens.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    grammar: Grammar | None = None
    logprobs: int | None = None

    def processors(self) -> list[Any]:
        """Return logits processors for one row. They run before the processors of `generate`."""
        made: list[Any] = []
        if self.frequency_penalty or self.presence_penalty:
            made.append(OpenAIPenalties(self.frequency_penalty, self.presence_penalty))
        if self.grammar is not None:
            made.append(self.grammar.processor())
        return made

    def scored(self, score_V: Tensor, token: int) -> Scored:
        """Return the `Scored` of a token from the log-probabilities of all tokens. Requires ``logprobs``."""
        assert self.logprobs is not None
        best = score_V.topk(min(self.logprobs, len(score_V)))
        top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return Scored(token, float(score_V[token]), top)

    def method(self, streamer: Any) -> Callable[..., Any]:
        """Return transformers' decoding loop with these processors, for calls outside the running batch.

        Args:
            streamer: of the call. `generate` does not pass it to a custom decoding loop.
        """
        from transformers import LogitsProcessorList

        front = self.processors()
        if self.logprobs is not None and streamer is not None:
            scores: deque[Tensor] = deque()

            def keep(ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
                scores.append(scores_BV.log_softmax(-1))
                return scores_BV

            front.insert(0, keep)
            streamer = _ScoringStreamer(streamer, scores, self.scored)

        def decode(model: TransformersModel, input_ids: Any, logits_processor: Any, **options: Any) -> Any:
            if len(input_ids) > 1:
                raise ValueError(
                    f"decoding={self!r:.200} is for one row, and the call computes {len(input_ids)}: pass one prompt, "
                    "num_beams=1 and num_return_sequences=1"
                )
            processors = LogitsProcessorList([*front, *logits_processor])
            return type(model)._sample(model, input_ids, processors, streamer=streamer, **options)

        return decode


class OpenAIPenalties:
    """Logits processor of `Decoding.frequency_penalty` and `Decoding.presence_penalty`."""

    def __init__(self, frequency: float, presence: float) -> None:
        self.frequency, self.presence = frequency, presence
        self._start: int | None = None

    def __call__(self, ids_BL: Tensor, scores_BV: Tensor) -> Tensor:
        if self._start is None:
            self._start = ids_BL.shape[1]
        new_BL = ids_BL[:, self._start :]
        count_BV = scores_BV.new_zeros(scores_BV.shape).scatter_add_(1, new_BL, scores_BV.new_ones(new_BL.shape))
        return scores_BV - self.frequency * count_BV - self.presence * (count_BV > 0)


class _ScoringStreamer:
    """Passes each new token of a single row on with its log-probabilities."""

    def __init__(self, streamer: Any, scores: deque[Tensor], scored: Callable[[Tensor, int], Scored]) -> None:
        self._streamer, self._scores, self._scored = streamer, scores, scored

    def put(self, token_B: Tensor) -> None:
        self._streamer.put(self._scored(self._scores.popleft()[0], int(token_B)))

    def end(self) -> None:
        self._streamer.end()
