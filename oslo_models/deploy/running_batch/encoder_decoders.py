"""Rows of encoder-decoders in the running batch: T5, BART and their kin.

The prompt of a row is the first token of the decoder, followed by the tokens of the encoder. One step encodes whole
prompts and computes the first new tokens. After that, a row has two parts: the keys and values of its decoder, which
grow by a token per step, and the keys and values of cross-attention, a fixed state of the row.

Legend:
    B: rows.
    L: positions of the encoder.
    V: vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from oslo_models.cache_argument import name_in_model
from oslo_models.deploy.running_batch.own_caches import CrossSlots
from oslo_models.deploy.running_batch.static_step import to_device
from oslo_models.deploy.running_batch.step import Step, WholePrompt
from oslo_models.deploy.running_batch.step_runner import StepRunner
from oslo_models.distributed.stopping import OtherRankError
from oslo_models.pipeline.sharded_model import ShardedModel


class EncoderDecoderRunner(StepRunner):
    """Computes the steps of an encoder-decoder on one rank."""

    rows: CrossSlots

    def __init__(self, model: ShardedModel, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._cache_name = name_in_model(model.forward, {}) or self._cache_name
        self._is_encoded = False
        self._takes_decoder_positions = "decoder_position_ids" in inspect.signature(model.forward).parameters

    def run(self, step: Step) -> Tensor | None:
        self._is_encoded = False
        try:
            return super().run(step)
        finally:
            self._is_encoded = False

    def skip(self, step: Step) -> None:
        self._skip_encoder(step)
        super().skip(step)

    def _skip_encoder(self, step: Step) -> None:
        """Let every stage raise that encodes prompts with this one, unless this one has taken part."""
        pipeline, prompts = self.model.pipeline, self._zeros_to_encode(step)
        if prompts is not None and pipeline is not None and self._keeps_logits and not self._is_encoded:
            with suppress(Exception):
                pipeline.encode((), prompts, OtherRankError("another step has failed"))

    def _zeros_to_encode(self, step: Step) -> dict[str, Tensor] | None:
        """Return zeros in the shape of the prompts that a step encodes; ``None`` if it encodes none."""
        rows, length = step.shape
        return {"input_ids": torch.zeros(rows, length - 1, dtype=torch.long)} if rows and step.chunk else None

    def _shape(self, step: Step) -> tuple[int, int]:
        rows, length = step.shape
        return rows, 1 if step.chunk else length

    def _prefill(self, step: Step) -> Tensor:
        prompt = WholePrompt(step.number, len(step.chunk), -1, self._adapter)
        return self._prefill_whole(replace(step, whole=[prompt]))

    def _prefill_whole(self, step: Step) -> Tensor:
        prompts, tokens = step.whole, iter(step.chunk)
        self._computed = {prompt.number for prompt in prompts}
        rows = [list(islice(tokens, prompt.length)) for prompt in prompts]
        adapters = [prompt.adapter for prompt in prompts]
        cache, logits_BV = self._begin_rows(rows, adapters)
        for row, prompt in enumerate(prompts):
            self.rows.join(cache, row, prompt.length - 1)
            self._join(prompt.number, prompt.adapter)
        return logits_BV

    def _begin_rows(self, rows: Sequence[list[int]], adapters: Sequence[int]) -> tuple[EncoderDecoderCache, Tensor]:
        """Compute prompts. Return their keys and values, and the logits [B, V] after the first tokens."""
        longest = max(map(len, rows)) - 1
        # on the right, as positions of the encoder count from its first token; per row: first token, tokens, padding
        values = [[*row, *[0] * (longest + 1 - len(row))] for row in rows]
        first_B1, ids_BL = to_device(values, self._device).split((1, longest), 1)
        mask_BL = None
        if any(len(row) <= longest for row in rows):
            lengths_B1 = to_device([[len(row) - 1] for row in rows], self._device)
            mask_BL = (torch.arange(longest, device=self._device) < lengths_B1).long()
        with self._adapters.selected(adapters, longest):
            encoded = self._encode({"input_ids": ids_BL, "attention_mask": mask_BL})
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        with self._adapters.selected(adapters, 1):
            inputs = {"decoder_input_ids": first_B1, "encoder_outputs": encoded, "attention_mask": mask_BL}
            return cache, self._logits({**inputs, self._cache_name: cache})

    def _encode(self, batch: dict[str, Any]) -> Any:
        """Return the output of the encoder on every stage."""
        if self.model.pipeline is None:
            return self.model.get_encoder()(**batch, return_dict=True)
        self._is_encoded = True  # if the encoder raises, the other stages raise, too
        return self.model.pipeline.encode((), batch)

    def _forward(
        self,
        cache: Cache,
        ids_BL: Tensor,
        positions: Tensor,
        options: dict[str, Any],
        features: Mapping[str, Any] = MappingProxyType({}),
        keep: int = 1,
        before_BD: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the last positions of each row, as `StepRunner`. The rows have begun."""
        cross = self.rows.cross
        lengths_B = to_device(cross.lengths, self._device)
        states = self._encoded_states(cross.mask(0, lengths_B))
        inputs = {
            "decoder_input_ids": ids_BL,
            "decoder_attention_mask": options["attention_mask"],
            **states,
            self._cache_name: self.rows.argument,
        }
        if self._takes_decoder_positions:
            inputs["decoder_position_ids"] = positions
        with self._positions_of_rows(positions):
            return self._logits(inputs, keep)

    def _encoded_states(self, mask_BL: Tensor | None) -> dict[str, Any]:
        """Return the arguments for cross-attention of rows that have begun."""
        cross = self.rows.cross
        # only their shape is read: the keys and values of cross-attention are in the cache
        zero = torch.zeros((), dtype=self.model.dtype, device=self._device)
        states_BLD = zero.expand(len(cross.lengths), cross.window, self._config.hidden_size)
        return {"encoder_outputs": BaseModelOutput(last_hidden_state=states_BLD), "attention_mask": mask_BL}

    def _logits(self, inputs: Mapping[str, Any], keep: int = 1) -> Tensor:
        logits_BLV: Tensor = self._output({**inputs, "use_cache": True}).logits
        return logits_BLV[:, -keep:].flatten(0, 1)  # other stages than the last one have no logits

    def _probe(self) -> EncoderDecoderCache:
        return self._begin_rows([[0, 0]], [0])[0]

    def _allocate(self, probe: EncoderDecoderCache) -> None:
        self.rows.reserve(probe)  # prompts are computed whole, in caches of transformers
