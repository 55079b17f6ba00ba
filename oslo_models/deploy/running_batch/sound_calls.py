"""Decides which calls of models that transcribe join the running batch.

A call of Speech2Text or Moonshine is one call of transformers' `generate`, and joins as it is. Whisper's `generate`
calls transformers' `generate` for each window of a sound. It runs in the application, and its inner calls join; see
`windows`.

Legend:
    B: rows.
    L: frames of features, samples, or tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from oslo_models.deploy.generation_limits import settings_of
from oslo_models.deploy.running_batch.prompt_sounds import (
    FEATURES,
    MASK,
    PromptSound,
    encoder_positions,
    frames_of,
    most_positions,
    shape_of,
    sounds_of_call,
)

FRAME_MASKS = "_get_feature_vector_attention_mask"
"""Method by which Speech2Text turns masks of frames into masks of encoder positions."""
DECODER_IDS, DECODER_MASK = "decoder_input_ids", "decoder_attention_mask"
_USER_CODE = frozenset(("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "decoding"))
_NOT_SETTINGS = frozenset((DECODER_IDS, DECODER_MASK, MASK, "inputs", "generation_config", "adapter_names"))
"""Arguments of `generate` that are neither features, nor code, nor in generation configurations."""
_OF_WHISPER = frozenset(
    (
        *("return_timestamps", "task", "language", "is_multilingual", "prompt_ids", "prompt_condition_type"),
        *("condition_on_prev_tokens", "temperature", "compression_ratio_threshold", "logprob_threshold"),
        *("no_speech_threshold", "time_precision", "time_precision_features", "return_segments"),
        *("force_unique_generate_call", "return_token_timestamps", MASK, "generation_config", "synced_gpus"),
    )
)
"""Arguments of Whisper's `generate` with which calls may join."""
_READ_BY_ENCODER = {"encoder_repetition_penalty": (None, 1, 1.0), "encoder_no_repeat_ngram_size": (None, 0)}
"""Settings that read the tokens of an encoder, with the values that turn them off. Sounds have no tokens."""
_NEW_TOKENS = 20
"""Default number of new tokens of `generate`."""


def reason_against_masks(config: Any) -> str | None:
    """Return why the encoder positions of a row cannot be hidden; ``None`` if they can, see `sound_runner`."""
    if config.model_type != "speech_to_text":
        return None
    from transformers import Speech2TextModel

    method = getattr(Speech2TextModel, FRAME_MASKS, None)
    if method is not None and [*inspect.signature(method).parameters][1:] == ["feature_vector_length", MASK]:
        return None
    return f"this release of transformers has no Speech2TextModel.{FRAME_MASKS} that takes a length and a mask"


class SoundCalls:
    """Decides which calls of one model join.

    Args:
        config: of the model.
        rows: maximum number of rows of the batch.
        longest: maximum number of tokens of a row.

    Attributes:
        by_windows: `generate` of the model calls transformers' `generate` for each window.
    """

    def __init__(self, config: Any, rows: int, longest: int) -> None:
        self._config, self._rows, self._longest = config, rows, longest
        self._name: str = FEATURES[config.model_type]
        self._most_positions = most_positions(config)
        self.by_windows = config.model_type == "whisper"

    def joins(self, kwargs: Mapping[str, Any], defaults: Any, streams: bool) -> bool:
        """Return whether a call of transformers' `generate` can join, with settings that other calls may have.

        Args:
            kwargs, defaults, streams: as for `Admission.joins`.
        """
        setting = settings_of(kwargs, defaults)
        names = kwargs.keys() - _NOT_SETTINGS - _USER_CODE - {self._name}
        if not all(hasattr(defaults, name) and not name.startswith("_") for name in names):
            return False
        features = self._features(kwargs)
        rows = 1 if streams or setting("do_sample") else self._rows
        if not (self._are_features(features, rows, is_window=True) and _turns_off_encoder(setting)):
            return False
        if not self._is_padded(kwargs.get(MASK), features):
            return False
        length = self._first_tokens(kwargs, setting, len(features))
        if not length:
            return False
        new, most = setting("max_new_tokens"), setting("max_length")
        try:
            total = length + int(new) if new is not None else int(most) if most is not None else length + _NEW_TOKENS
        except (TypeError, ValueError):
            return False
        return length < total <= self._longest

    def hears(self, kwargs: Mapping[str, Any], defaults: Any, streams: bool) -> bool:
        """Return whether the windows of a call of Whisper's `generate` can join.

        The call is greedy, or has one row. Nothing in it needs the scores, the attention, or the model itself.

        Args:
            kwargs, defaults, streams: as for `Admission.joins`.
        """
        known = {name for name in kwargs if hasattr(defaults, name) and not name.startswith("_")}
        features, setting = kwargs.get(self._name), settings_of(kwargs, defaults)
        if streams or kwargs.keys() - known - _OF_WHISPER - {self._name} or not _turns_off_encoder(setting):
            return False
        if not self._are_features(features, self._rows, is_window=False):
            return False
        assert isinstance(features, Tensor)
        if any(setting(name) is not None for name in ("logprob_threshold", "no_speech_threshold")):
            return False
        if kwargs.get("return_token_timestamps") or kwargs.get("synced_gpus"):
            return False
        temperature, is_alone = kwargs.get("temperature"), len(features) == 1
        if not is_alone and (setting("condition_on_prev_tokens") or not (temperature is None or temperature == 0)):
            return False
        return self._longest >= int(self._config.max_target_positions)

    def separate(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[PromptSound, ...]]:
        """Return the arguments of a call that joins without its sounds, and its sounds."""
        taken = (self._name, MASK, DECODER_MASK, "inputs")
        rest = {name: value for name, value in kwargs.items() if name not in taken}
        return rest, sounds_of_call({**kwargs, self._name: self._features(kwargs)}, self._config)

    def _features(self, kwargs: Mapping[str, Any]) -> Any:
        found = kwargs.get(self._name)
        return kwargs.get("inputs") if found is None else found

    def _are_features(self, features: Any, rows: int, is_window: bool) -> bool:
        """Return whether features have the shape that the encoder takes. A window of Whisper has a fixed length."""
        if not isinstance(features, Tensor) or not features.is_floating_point() or features.dim() < 2:
            return False
        frames = frames_of(features, self._config)
        if not 0 < len(features) <= rows or features.shape[1:] != shape_of(self._config, frames)[1:]:
            return False
        if self.by_windows:
            return frames == 2 * self._most_positions if is_window else frames > 0
        return 0 < encoder_positions(self._config, frames) <= self._most_positions

    def _is_padded(self, mask_BL: Any, features: Tensor) -> bool:
        """Return whether a mask hides only the ends of sounds. Whisper's encoder reads none."""
        if mask_BL is None or self.by_windows:
            return True
        shape = (len(features), frames_of(features, self._config))
        if not isinstance(mask_BL, Tensor) or tuple(mask_BL.shape) != shape:
            return False
        shown_BL = mask_BL.bool()
        lengths = [encoder_positions(self._config, frames) for frames in shown_BL.sum(1).tolist()]
        return bool((shown_BL[:, :-1] >= shown_BL[:, 1:]).all()) and min(lengths) > 0

    def _first_tokens(self, kwargs: Mapping[str, Any], setting: Callable[[str], Any], rows: int) -> int:
        """Return the number of tokens with which the decoder begins; 0 if the call cannot join."""
        ids_BL, mask_BL = kwargs.get(DECODER_IDS), kwargs.get(DECODER_MASK)
        start = setting("decoder_start_token_id")
        start = setting("bos_token_id") if start is None else start
        if ids_BL is None:
            return int(mask_BL is None and isinstance(start, int))
        if not isinstance(ids_BL, Tensor) or ids_BL.dim() != 2 or ids_BL.dtype.is_floating_point:
            return 0
        if len(ids_BL) != rows or (mask_BL is not None and not (mask_BL.shape == ids_BL.shape and mask_BL.all())):
            return 0
        # transformers puts the start before tokens that begin with another one, except for Whisper
        begins = self.by_windows or (isinstance(start, int) and bool((ids_BL[:, 0] == start).all()))
        return int(ids_BL.shape[1]) if begins else 0


def _turns_off_encoder(setting: Callable[[str], Any]) -> bool:
    return all(setting(name) in values for name, values in _READ_BY_ENCODER.items())
