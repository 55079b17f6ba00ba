"""The sounds of prompts in the running batch: their arguments, and the positions that an encoder makes of them.

Legend:
    B: rows.
    L: frames of features, or samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS
from oslo_models.deploy.running_batch.prompt_images import PromptImages

FEATURES = {"whisper": "input_features", "speech_to_text": "input_features", "moonshine": "input_values"}
"""By type whose encoder reads sounds and whose calls join: the argument with the features of a sound."""
MASK = "attention_mask"
_MOONSHINE = ((127, 64), (7, 3), (3, 2))
"""Kernel and stride of the convolutions of Moonshine."""


class PromptSound(NamedTuple):
    """The sound of one row of a call. Every rank has it.

    The prompt of such a row has the tokens of the decoder only. One step encodes the sound, the next one computes the
    prompt.

    Attributes:
        row: index of the row in its call.
        arguments: the features [1, ...] and, if the call has one, the mask [1, L].
        frames: number of frames or samples, with padding.
        encoder_positions: number of positions that the encoder makes of them.
    """

    row: int
    arguments: dict[str, Any]
    frames: int
    encoder_positions: int

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """Return the frames to encode before the tokens between two positions: all of them before the first token."""
        return (0, self.frames) if start == 0 < stop else (0, 0)


def sounds_of_call(given: dict[str, Any], config: Any) -> tuple[PromptSound, ...]:
    """Return the sound of each row of a call."""
    name = FEATURES[config.model_type]
    features, mask_BL = given[name], given.get(MASK)
    frames = frames_of(features, config)
    positions = encoder_positions(config, frames)
    sounds = []
    for row in range(len(features)):
        arguments = {name: features[row : row + 1]}
        if mask_BL is not None and config.model_type != "whisper":  # whose encoder reads none
            arguments[MASK] = mask_BL[row : row + 1]
        sounds.append(PromptSound(row, arguments, frames, positions))
    return tuple(sounds)


def media_of_rows(images: Iterable[Any], config: Any) -> list[Any]:
    """Return the `PromptSound` or the `PromptImages` of each row of a request that has any; see `Request`."""
    kind: Any = PromptSound if reads_sounds(config) else PromptImages
    return [kind._make(each) for each in images]


def frames_of(features: Tensor, config: Any) -> int:
    """Return the number of frames, or samples, of features."""
    return int(features.shape[1 if config.model_type == "speech_to_text" else -1])


def shape_of(config: Any, frames: int) -> tuple[int, ...]:
    """Return the shape of the features of one row."""
    if config.model_type == "moonshine":
        return (1, frames)
    if config.model_type == "whisper":
        return (1, config.num_mel_bins, frames)
    return (1, frames, config.input_feat_per_channel * config.input_channels)


def encoder_positions(config: Any, frames: int) -> int:
    """Return the number of positions that an encoder makes of frames or samples; less than 1 if they are too few."""
    if config.model_type == "whisper":
        return (frames + 1) // 2
    if config.model_type == "moonshine":
        for kernel, stride in _MOONSHINE:
            frames = (frames - kernel) // stride + 1
        return frames
    for _ in range(config.num_conv_layers):
        frames = (frames - 1) // 2 + 1
    return frames


def most_positions(config: Any) -> int:
    """Return the maximum number of positions of a sound in the encoder."""
    return DEFAULT_LIMITS.length if config.model_type == "moonshine" else int(config.max_source_positions)


def reads_sounds(config: Any) -> bool:
    """Return whether the encoder of a model reads sounds."""
    return bool(config.is_encoder_decoder) and config.model_type in FEATURES
