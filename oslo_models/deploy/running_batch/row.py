"""Rows of the running batch: sampling settings, new tokens and stopping, as in transformers' `generate`.

Legend:
    B: rows.
    L: tokens.
    V: vocabulary.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from oslo_models.deploy.running_batch.nucleus import faster
from oslo_models.deploy.running_batch.prompt_images import PromptImages
from oslo_models.deploy.running_batch.prompt_sounds import PromptSound
from oslo_models.deploy.running_batch.sampling import CommonDraws, warp_of
from oslo_models.deploy.running_batch.static_step import to_device
from oslo_models.distributed.stopping import of_one_rank
from oslo_models.fusion.suppressed_tokens import suppression
from oslo_models.layers.invariant_sums import log_probabilities

_KEY_BITS = 256
"""More bits than a key of a token or an image has."""


class Row:
    """One row, with transformers' logits processors and stopping criteria, and a separate random generator.

    Args:
        ids_BL: [1, L], including the padding of the call. Processors see it, as in `generate`. Of an encoder-decoder,
            the first token of the decoder.
        prompt: the tokens without padding. Of an encoder-decoder, the first token of the decoder comes before those of
            the encoder. With a sound, the first tokens of the decoder.
        seed: of the random generator, or its state.
        settings: processors, criteria and configuration of `generate`, and the function that computes a streamer's
            log-probabilities from scores and a token; ``None`` without log-probabilities.
        device: on which tokens are chosen.
        images: of the prompt, or its sound.
        adapter: see `row_adapters`.
        tenant: see `Request`.

    Attributes:
        number: of the call.
        given_BL: the prompt, including the padding of the call, [1, L].
        keys: the tokens of the prompt for prefix reuse; see `PromptImages`. Rows with different adapters share none.
        scored: the function for log-probabilities in ``settings``.
        generator: set if the row samples.
        is_exact: training computes the same log-probabilities; see `use_exact_rollouts`.
        common_draws: random numbers of all rows, in place of the generator's; see `CommonDraws`.
        warp: the processors as a `Warp`, for batched sampling; ``None`` if a `Warp` cannot express them.
        new: the generated tokens.
        ended: the row is complete.
        shares: other prompts may reuse its keys and values.
        logprobs: logarithms of the probabilities from which the tokens were drawn; ``None``: they are not recorded.
        is_plain: greedy, without processors and log-probabilities.
        seconds: CPU time of the processors for the newest token.
        speculation: see `Speculating`.
    """

    def __init__(
        self,
        number: int,
        ids_BL: Tensor,
        prompt: list[int],
        seed: int | Tensor,
        settings: Any,
        device: torch.device,
        keeps_logprobs: bool = False,
        images: PromptImages | PromptSound | None = None,
        adapter: int = 0,
        tenant: int = 0,
    ) -> None:
        self.tenant = tenant
        self.number, self.prompt, self.seed, self._device = number, prompt, seed, device
        self.images, self.keys = images, images.reuse_keys() if isinstance(images, PromptImages) else prompt
        assert len(self.keys) == len(prompt)
        self.adapter = adapter
        if adapter:
            first = -(abs(self.keys[0]) + (adapter << _KEY_BITS))  # negative, as it is no token
            self.keys = [first, *self.keys[1:]]
        processors, criteria, self._config, self.scored = settings
        self._processors, self.warp = LogitsProcessorList(map(_fast, processors)), warp_of(processors)
        self.given_BL = self._buffer_BL = ids_BL
        self._written = self._length = ids_BL.shape[1]
        self._ends = _Ends(criteria)
        self.new: list[int] = []
        self.speculation: Any = None
        self.ended, self.shares, self.seconds = False, True, 0.0
        self.common_draws: CommonDraws | None = None
        self.is_exact = False
        self.generator: torch.Generator | None = None
        if self._config.do_sample:
            self.generator = torch.Generator(device)
            self.generator.set_state(seed) if isinstance(seed, Tensor) else self.generator.manual_seed(seed)
        self.logprobs: list[float] | None = [] if keeps_logprobs else None
        self.is_plain = not self._processors and self.generator is None and not self.reads_scores

    @property
    def reads_scores(self) -> bool:
        """Whether the row needs log-probabilities beside its tokens."""
        return self.scored is not None or self.logprobs is not None

    @property
    def length(self) -> int:
        """Number of tokens, including the padding of the call and the new tokens."""
        return self._length

    @property
    def room(self) -> float:
        """Maximum number of further tokens."""
        return self._ends.length - self._length

    @property
    def host_ids_BL(self) -> Tensor:  # noqa: N802  the name says its shape
        """The prompt and the new tokens, [1, L], on the host."""
        return torch.cat((self.given_BL.cpu(), torch.tensor([self.new], dtype=torch.long)), 1)

    @property
    def ids_BL(self) -> Tensor:  # noqa: N802  the name says its shape
        """The prompt and the new tokens, [1, L], on the device. Access copies the latest tokens to the device."""
        late = self.new[len(self.new) - (self._length - self._written) :]
        held_BL = self._buffer_BL
        if held_BL.device != self._device or self._length > held_BL.shape[1]:
            self._buffer_BL = held_BL.new_empty(1, 2 * self._length + 16, device=self._device)
            self._buffer_BL[:, : self._written] = held_BL[:, : self._written]
        if late:
            self._buffer_BL[:, self._written : self._length] = late[0] if len(late) == 1 else self._sent(late)
        self._written = self._length
        return self._buffer_BL[:, : self._length]

    def _sent(self, tokens: list[int]) -> Tensor:
        return to_device([tokens], self._device)

    @property
    def pad(self) -> int:
        """The token with which `generate` pads the ended rows of a batch."""
        pad = self._config._pad_token_tensor
        return 0 if pad is None else int(pad)

    def take(self, logits_V: Tensor) -> Any:
        """Choose the next token from the logits. Return the value for the streamer: the token or a `Scored`."""
        # the same operations as in transformers' `_sample`, on one row
        logits_V = logits_V.to(copy=True, dtype=torch.float32, device=self._device)
        scored = None if self.scored is None else logits_V.log_softmax(-1)
        scores_V = self.processed(logits_V)
        if self.common_draws is not None:
            token = int(
                (scores_V.softmax(-1) / self.common_draws.next(self.number, len(self.new), scores_V)).argmax(-1)
            )
        elif self.generator is not None:
            token = int(torch.multinomial(scores_V.softmax(-1), 1, generator=self.generator))
        else:
            token = int(scores_V.argmax(-1))
        if self.logprobs is not None:
            self.logprobs.append(self._log_probability(scores_V, token))
        self.take_token(token)
        return token if scored is None else self.scored(scored, token)

    def _log_probability(self, scores_V: Tensor, token: int) -> float:
        if self.is_exact:
            return float(log_probabilities(scores_V[None], torch.tensor([token], device=scores_V.device)))
        return float(scores_V.log_softmax(-1)[token])

    def draw_(self, noise_V: Tensor) -> None:
        """Fill a tensor with the exponentially distributed numbers for the next token."""
        if self.common_draws is None:
            noise_V.exponential_(1, generator=self.generator)
        else:
            noise_V.copy_(self.common_draws.next(self.number, len(self.new), noise_V))

    def processed(self, logits_V: Tensor) -> Tensor:
        """Apply the processors to float32 logits."""
        if not self._processors:
            return logits_V
        began = time.thread_time()
        scores_V = self._processors(self.ids_BL, logits_V[None])[0]
        self.seconds = time.thread_time() - began
        return scores_V

    def take_token(self, token: int) -> int:
        """Append a chosen token and return it."""
        self._length += 1
        self.new.append(token)
        self.ended = self._ends(self, token)
        return token


def _fast(processor: Any) -> Any:
    """Return a faster logits processor with the same result, or ``processor`` itself."""
    return suppression(processor) or faster(processor)


class _Ends:
    """transformers' stopping criteria for one row. Checks the most common ones without tensors.

    Attributes:
        length: maximum number of tokens of the row.
    """

    def __init__(self, criteria: Any) -> None:
        self.length, self._tokens, others = float("inf"), set[int](), []
        for each in of_one_rank(criteria):  # the leader of the batch decides for all ranks
            if type(each) is MaxLengthCriteria:
                self.length = min(self.length, each.max_length)
            elif type(each) is EosTokenCriteria:
                self._tokens.update(each.eos_token_id.flatten().tolist())
            else:
                others.append(each)
        self._others = StoppingCriteriaList(others)

    def __call__(self, row: Row, token: int) -> bool:
        """Return whether the row ends with its newest token."""
        by_others = bool(self._others) and bool(self._others(row.ids_BL, None).all())
        return by_others or token in self._tokens or row._length >= self.length


class Call:
    """A call of `generate` in the batch: combines its rows into the result.

    Args:
        streams: send tokens as they are generated. Such a call has one row.
        goes_on: see `Request`.
    """

    def __init__(self, number: int, streams: bool, rows: list[Row], goes_on: bool = False) -> None:
        self.number, self.streams, self.rows, self._goes_on = number, streams, rows, goes_on

    @property
    def ended(self) -> bool:
        return all(row.ended for row in self.rows)

    def result(self) -> Any:
        """Return the result of `generate`: prompts and new tokens, [B, L]. See `Request.goes_on` for a second value."""
        tokens_BL, generator = self._tokens(), self.rows[0].generator
        return (tokens_BL, None if generator is None else generator.get_state()) if self._goes_on else tokens_BL

    def _tokens(self) -> Tensor:
        if len(self.rows) == 1:
            return self.rows[0].host_ids_BL
        longest = max(len(row.new) for row in self.rows)
        return torch.cat([F.pad(row.host_ids_BL, (0, longest - len(row.new)), value=row.pad) for row in self.rows])
