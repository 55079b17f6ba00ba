"""Counts the tokens of sounds from the masks of their frames."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def tokens_of_sounds(mask: Tensor, config: Any) -> list[int]:
    """Return the number of placeholder tokens of each sound.

    Args:
        mask: ``[sounds, frames]`` or ``[sounds, samples]``, 1 for those without padding. Models without an
            ``audio_config`` mark the features of the projector, ``[sounds, features]``.
        config: configuration of the model.

    Raises:
        ValueError: the encoder of sounds is unknown, or its frames are not in whole chunks.

    Source: ``_get_feat_extract_output_lengths`` and ``get_audio_features`` in transformers.
    """
    encoder = getattr(config, "audio_config", None) or getattr(config, "acoustic_tokenizer_encoder_config", None)
    kind = getattr(encoder, "model_type", None)
    if encoder is None or kind in ("fun_asr_nano_encoder", "inkling_audio"):  # a token for each frame
        lengths = mask.sum(-1)
    elif kind == "qwen3_asr_encoder":  # three convolutions over each chunk
        if mask.shape[-1] % (2 * encoder.n_window):
            raise ValueError(
                f"a mask of {mask.shape[-1]} frames has no whole chunks of {2 * encoder.n_window}: pad the sounds as "
                "the processor of the model does"
            )
        chunks = mask.unflatten(-1, (-1, 2 * encoder.n_window)).sum(-1)
        lengths = _halved(chunks, 3).sum(-1)
    elif kind == "qwen3_omni_moe_audio_encoder":  # the same, without padding to whole chunks
        size = 2 * encoder.n_window
        whole, rest = mask.sum(-1) // size, mask.sum(-1) % size
        lengths = whole * ((size + 7) // 8) + _halved(rest, 3)
    elif kind in ("audioflamingo3_encoder", "qwen2_5_omni_audio_encoder", "qwen2_audio_encoder"):
        # a convolution, and an average of two positions
        lengths = _halved(mask.sum(-1), 1) // 2
    elif kind == "glmasr_encoder":  # a convolution, and a projector of four positions
        lengths = _halved(mask.sum(-1), 1) // 4
    elif kind == "moss_transcribe_diarize_audio":  # a convolution, and a projector of whole groups of positions
        lengths = (_halved(mask.sum(-1), 1) + config.audio_merge_size - 1) // config.audio_merge_size
    elif kind == "wavtokenizer_encoder":  # convolutions with padding
        lengths = (mask.sum(-1) + encoder.hop_length - 1) // encoder.hop_length
    elif kind == "omniasr_audio":  # convolutions without padding
        lengths = mask.sum(-1)
        for kernel, stride in zip(encoder.conv_kernel, encoder.conv_stride, strict=True):
            lengths = (lengths - kernel) // stride + 1
    elif kind == "vibevoice_acoustic_tokenizer_encoder":  # causal convolutions; also for the last part of a hop
        lengths = (mask.sum(-1) + encoder.hop_length - 1) // encoder.hop_length
    else:
        raise ValueError(f"the number of tokens of a sound is unknown for the encoder {kind!r}")
    return list(map(int, lengths.tolist()))


def _halved(lengths: Tensor, times: int) -> Tensor:
    """Return lengths after so many convolutions of stride 2 that pad one frame on each side."""
    for _ in range(times):
        lengths = (lengths + 1) // 2
    return lengths
