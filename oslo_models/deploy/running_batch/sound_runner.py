"""Rows of models that transcribe in the running batch: Whisper, Speech2Text and Moonshine.

One step encodes the sound of a row. The next one computes the tokens with which its decoder begins, and the row joins.
From then on, it is a row of an encoder-decoder.

Legend:
    B: rows.
    L: positions of the encoder, or tokens.
    V: vocabulary.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from oslo_models.deploy.running_batch.encoder_decoders import EncoderDecoderRunner
from oslo_models.deploy.running_batch.prompt_images import share_failure
from oslo_models.deploy.running_batch.prompt_sounds import FEATURES, MASK, PromptSound, most_positions, shape_of
from oslo_models.deploy.running_batch.sound_calls import FRAME_MASKS
from oslo_models.deploy.running_batch.static_step import to_device
from oslo_models.deploy.running_batch.step import Step
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.pipeline.sharded_model import ShardedModel

_PROBED = {"moonshine": 2048, "speech_to_text": 16}
"""Frames or samples of a short sound. Whisper reads whole windows only."""


class SoundRunner(EncoderDecoderRunner):
    """Computes the steps of a model that transcribes on one rank."""

    def __init__(self, model: ShardedModel, *args: Any, **kwargs: Any) -> None:
        super().__init__(model, *args, **kwargs)
        self._type = model.config.model_type
        self._sound: PromptSound | None = None
        self._heard: Any = None  # the output of the encoder for the prompt in prefill

    def rest(self) -> None:
        super().rest()
        self._sound = self._heard = None

    def _zeros_to_encode(self, step: Step) -> dict[str, Tensor] | None:
        return self._silence(step.images[1]) if step.encodes else None

    def _silence(self, frames: int) -> dict[str, Tensor]:
        shape = shape_of(self.model.config, frames)
        return {FEATURES[self._type]: torch.zeros(shape, dtype=self.model.dtype, device=self._device)}

    def _shape(self, step: Step) -> tuple[int, int]:
        return step.shape

    def _begin(self, step: Step) -> None:
        sound, self.images = self.images, None
        super()._begin(step)
        assert isinstance(sound, PromptSound)
        self._sound = sound

    def _encode_media(self, step: Step) -> None:
        failure, sound = None, self._sound
        try:
            assert sound is not None
            batch = {name: value.to(self._device) for name, value in sound.arguments.items()}
            self._heard = self._encode(batch)
        except Exception as error:  # noqa: BLE001  raised on every rank
            failure = error
            self._skip_encoder(step)
        share_failure(self.model, failure)

    def _prefill(self, step: Step) -> Tensor:
        sound, heard = self._sound, self._heard
        assert sound is not None and heard is not None
        self._sound = self._heard = None
        mask_1L = sound.arguments.get(MASK)
        mask_1L = None if mask_1L is None else mask_1L.to(self._device)
        cache, logits_1V = self._begin_row(step.chunk, heard, mask_1L, self._adapter)
        self.rows.join(cache, 0, self._length(heard, mask_1L), len(step.chunk))
        self._join(step.number, self._adapter)
        return logits_1V

    def _begin_row(
        self, tokens: list[int], heard: Any, mask_1L: Tensor | None, adapter: int
    ) -> tuple[EncoderDecoderCache, Tensor]:
        """Compute the first tokens of a decoder. Return their keys and values, and the logits [1, V] after them."""
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        inputs = {"decoder_input_ids": to_device([tokens], self._device), "encoder_outputs": heard}
        inputs |= {MASK: mask_1L, self._cache_name: cache}
        with self._adapters.selected([adapter], len(tokens)):
            return cache, self._logits(inputs)

    def _length(self, heard: Any, mask_1L: Tensor | None) -> int:
        """Return the number of encoder positions that are no padding. They come first."""
        length = heard.last_hidden_state.shape[1]
        if mask_1L is None:
            return int(length)
        if self._type == "moonshine":
            return int(heard.attention_mask.sum())
        model: Any = self.model
        return int(model._get_feat_extract_output_lengths(mask_1L.sum()))

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._masks_of_positions():
            return super()._forward(*args, **kwargs)

    def _masks_of_positions(self) -> AbstractContextManager[None]:
        """Context in which masks are of encoder positions. Speech2Text takes them as masks of frames."""
        if self._type != "speech_to_text":
            return nullcontext()
        own = {FRAME_MASKS: lambda length, mask_BL: mask_BL}
        return override_attributes(self.model.base_model, own)

    def _encoded_states(self, mask_BL: Tensor | None) -> dict[str, Any]:
        states = super()._encoded_states(mask_BL)
        if self._type != "moonshine":
            return states
        hidden_BLD = states["encoder_outputs"].last_hidden_state
        empty = dict.fromkeys(("hidden_states", "attentions"))
        outputs = SimpleNamespace(last_hidden_state=hidden_BLD, attention_mask=mask_BL, **empty)
        return {"encoder_outputs": outputs}

    def _probe(self) -> EncoderDecoderCache:
        frames = _PROBED.get(self._type) or 2 * most_positions(self.model.config)
        return self._begin_row([0], self._encode(self._silence(frames)), None, 0)[0]
