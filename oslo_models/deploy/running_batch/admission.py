"""Decides which calls of `generate` join the running batch, and sets its default limits.

The other calls are computed one by one. Steps of the batch run between their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from oslo_models import registry
from oslo_models.deploy.generation_limits import settings_of
from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS, GPU_LIMITS, MOST_CACHE, BatchLimits, columns
from oslo_models.deploy.running_batch.prompt_images import (
    ARGUMENTS,
    BOTH_WAYS,
    PromptImages,
    arguments_of,
    images_of_call,
)
from oslo_models.deploy.running_batch.prompt_sounds import most_positions, reads_sounds
from oslo_models.deploy.running_batch.slot_states import BLOCKS, INDEXED, has_states
from oslo_models.deploy.running_batch.sound_calls import SoundCalls, reason_against_masks

_STATES = "some of its blocks keep a state of the whole sequence in place of keys and values"
_KINDS = {
    **dict.fromkeys(("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"), ""),
    **dict.fromkeys(("moe", "mlp", *INDEXED), ""),
    **dict.fromkeys(
        ("compressed_sparse_attention", "heavily_compressed_attention"),
        "its cache holds compressed keys beside the keys of a window",
    ),
}
"""Reason why a model with a kind of block (``layer_types``) cannot join; empty: it can. Other kinds keep states."""
WITH_STATES = frozenset(
    (
        *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2", "inkling2_loop"),
        *("inkling_mm_model", "inkling_text", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma"),
        *("inkling2_loop_text", "inkling2_text", "jamba", "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm2_vl"),
        *("lfm3", "lfm3_vl"),
        *(
            "mamba",
            "mamba2",
            "minicpm_ocr",
            "minicpmv4_6",
            "minicpmv4_7",
            "minimax",
            "nemotron_h",
            "olmo_hybrid",
            "qwen3_5",
            "qwen3_5_moe",
            "qwen3_5_moe_text",
        ),
        *("qwen3_5_text", "qwen3_next", "zamba", "zamba2", "zaya"),
    )
)
"""Decoder types that join with states of their rows, see `slot_states`."""
WITHOUT_DRAFTS = frozenset(
    (
        *("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text", "inkling_mm_model", "inkling_text"),
        *("minimax", "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "zaya"),
    )
)
"""Types among them with more modules with states than one mixer of each block, whose rows have no drafts."""
IN_ONE_STEP = frozenset(("falcon_mamba", "jamba", "mamba", "minimax", "recurrent_gemma", "zamba"))
"""Types among them with scans of prompts that cannot continue from a state. A step computes their whole prompt."""
EXCLUSIVE: Mapping[str, str] = {
    "openai-gpt": "it has no key-value cache",
    "xlm": "it has no key-value cache",
    "flaubert": "it has no key-value cache",
    "xlnet": "it predicts with a separate query, and its cache grows by the prompt",
    "reformer": "its cache holds hidden states in buckets of hashes",
    "rwkv": "transformers mixes the states of its rows when it decodes several",
    "blt": "it makes patches of the bytes of each step, and its cache is in two parts",
    "doge": "which of equal keys its masks keep depends on the length of a batch, and its routers mix the rows",
    "cpmant": "it is given all tokens in each step, without a mask and positions",
    "idefics": "some blocks read the features of images, beside the cache of tokens, and each call has images",
    **dict.fromkeys(("kosmos-2", "kosmos-2.5"), "a mask marks the places of its images, beside the tokens"),
    "paligemma": "the tokens of a prompt attend to each other in both directions",
    "vibevoice_asr": "its forward has no argument for the positions of each row",
    "voxtral_realtime": "its encoder keeps another cache, and each token reads a part of the sound",
    "roformer": "it counts positions from the longest row of a batch and cannot take the positions of each row",
}
"""Decoder types of the zoo that cannot join for reasons other than the kinds of their blocks, with the reason."""
TEXT_ONLY: Mapping[str, str] = {
    **dict.fromkeys(("deepseek_ocr2", "step3p7"), "an image and its tiles are in different arguments"),
    "emu3": "its images are tokens of a codebook, which its forward computes",
    **dict.fromkeys(
        () if registry.INSTALLED >= (5, 24) else BOTH_WAYS,
        "older releases than transformers 5.24 compute the mask of their images for a whole prompt only",
    ),
    "molmo2": "the tokens of all images of a prompt attend to each other in both directions",
    "inkling_mm_model": "calls with its images were not tested in the batch",
    "hunyuan_vl": "its positions count the images of all rows of a call",
    **dict.fromkeys(("minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), "the pixels of all its images are one row"),
    "mllama": "some blocks read the features of images, beside the cache of tokens",
    "qwen4_exp": "its indexers read the positions of height and width of all tokens",
    "ovis2": "the tokens around an image have embeddings from the call with its pixels",
}
"""Decoder types whose calls without images join, and the reason why calls with images do not."""
_SINCE_5_24 = frozenset(("inkling_text", "qwen4_exp_text", "recurrent_gemma"))
SINCE = frozenset() if registry.INSTALLED >= (5, 24) else _SINCE_5_24 | TEXT_ONLY.keys() - BOTH_WAYS.keys()
"""Types that join with newer releases of transformers than the installed one."""
ENCODER_DECODERS = frozenset(
    (
        *("bart", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "mvp", "pegasus", "plbart"),
        *("longt5", "pegasus_x", "t5", "t5gemma", "umt5"),
    )
)
"""Encoder-decoder types that join. Padding on the right does not change the states of their encoders, and positions of
their decoders are relative, are given, or come from a table; see `position_tables`."""
CANNOT_JOIN: Mapping[str, str] = {
    "led": "its decoder reads no mask when it computes one token",
    **dict.fromkeys(
        ("nllb-moe", "switch_transformers"),
        "its experts have a capacity, which the tokens of all rows of a batch share",
    ),
    "bigbird_pegasus": "the blocks of its encoder depend on the length of a batch",
}
"""Encoder-decoder types that cannot join, with the reason. Others were not tested."""
_WITHOUT_WINDOW = (BLOCKS - {"hybrid_sliding"}) | INDEXED | {"full_attention", "moe", "mlp"}
"""Kinds of blocks that attend to all tokens, or to none."""
READ_PADDING: Mapping[str, str] = {
    "trocr": "its positions count the padding",
    "minimax": "its blocks of tokens are counted from the padding",
    **dict.fromkeys(("minimax_m3_vl", "minimax_m3_vl_text"), "its indexers count blocks of keys from the padding"),
    "xlstm": "its states include the padding",
}
"""Decoder types with other tokens for padded rows in transformers, and the reason. Padded calls do not join."""
_BIASES = ("mamba_proj_bias", "use_bias", "conv_bias", "add_bias_linear")
"""Options of decoders with states that give the projections before a convolution a bias."""
_BY_COLUMNS: Mapping[str, str] = {
    "mpt": "its biases count the columns of the cache between two tokens, and drafts leave empty columns",
}
"""Decoder types that join, but without drafted tokens."""
_NOT_SETTINGS = {
    *("input_ids", "inputs", "attention_mask"),
    *("generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "decoding"),
    "adapter_names",
}
"""Arguments of `generate` that are not in generation configurations."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "num_beam_groups": (None, 1),
    "return_dict_in_generate": (None, False),
    "use_cache": (None, True),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "cache_implementation": (None,),
    "prefill_chunk_size": (None,),
    "watermarking_config": (None,),
    "low_memory": (None, False),
}
"""Settings that need another decoding method, unless they have one of these values."""
_NEW_TOKENS = 20
"""Default number of new tokens of `generate`."""


class Admission:
    """Decides which calls of one model join its running batch. A call joins only if its tokens do not change.

    Such a call is greedy or samples one row, passes token ids, perhaps with images, and fits into the batch to its end.
    Its padding is on the left only; for an encoder, on the right only. The configuration is read once, because
    transformers takes as long for it as all other checks of a call.

    Args:
        config: of the model.
        limits: of the batch.
        takes_features: whether the model's forward takes encoded images.

    Attributes:
        reason: why no call can join; ``None`` if calls can join.
        sounds: decides for a model whose encoder reads sounds; ``None`` for other models.
    """

    def __init__(self, config: Any, limits: BatchLimits, takes_features: bool = False) -> None:
        reason = reason_against(config)
        if reason is None and reads_sounds(config):
            reason = reason_against_masks(config)
        self._config, kind = config, _kind(config)
        taken = takes_features and kind not in TEXT_ONLY
        self._of_images = arguments_of(kind) if taken else frozenset()
        self._reads_padding = reason_against_padding(config) is not None
        self.reason = "max_batch_size=1" if reason is None and limits.rows == 1 else reason
        self._rows, self._longest = limits.rows, longest(config, limits)
        self._encodes = config.is_encoder_decoder
        # a step has the first token of the decoder beside those of the encoder
        self._most_encoded = min(self._longest, limits.length - 1)
        self.sounds = SoundCalls(config, limits.rows, self._longest) if reads_sounds(config) else None

    def joins(self, kwargs: Mapping[str, Any], defaults: Any, streams: bool) -> bool:
        """Return whether a call can join.

        Args:
            kwargs: the arguments of the call.
            defaults: the generation configuration for settings that the arguments leave out.
            streams: whether the call has a streamer.
        """
        if self.reason is not None or defaults is None:
            return False
        if self.sounds is not None:
            decides = self.sounds.hears if self.sounds.by_windows else self.sounds.joins
            return unsupported_setting(kwargs, defaults) is None and decides(kwargs, defaults, streams)
        names = kwargs.keys() - _NOT_SETTINGS - self._of_images
        if not all(hasattr(defaults, name) and not name.startswith("_") for name in names):
            return False
        setting = settings_of(kwargs, defaults)
        if unsupported_setting(kwargs, defaults) is not None:
            return False
        ids_BL: Any = kwargs.get("input_ids")
        ids_BL = kwargs.get("inputs") if ids_BL is None else ids_BL
        rows = 1 if streams or setting("do_sample") else self._rows
        mask_BL = kwargs.get("attention_mask")
        if not (_is_batch(ids_BL, rows) and _is_padded(mask_BL, ids_BL, on_the_right=self._encodes)):
            return False
        if self._encodes and not (ids_BL.shape[1] <= self._most_encoded and _has_one_start(setting, ids_BL, mask_BL)):
            return False
        if self._reads_padding and mask_BL is not None and not mask_BL.all():
            return False
        new, most = setting("max_new_tokens"), setting("max_length")
        length = 1 if self._encodes else ids_BL.shape[1]
        try:
            total = length + int(new) if new is not None else int(most) if most is not None else length + _NEW_TOKENS
        except (TypeError, ValueError):
            return False
        return length < total <= self._longest and self._fits(kwargs, ids_BL)

    def joins_window(self, kwargs: Mapping[str, Any], defaults: Any) -> bool:
        """Return whether the inner call for a window of a sound can join; see `windows`."""
        assert self.sounds is not None
        return unsupported_setting(kwargs, defaults) is None and self.sounds.joins(kwargs, defaults, False)

    def _fits(self, kwargs: Mapping[str, Any], ids_BL: Tensor) -> bool:
        """Return whether the images of a call fit its placeholder tokens. Otherwise, `generate` raises."""
        if not kwargs.keys() & ARGUMENTS:
            return True
        try:
            self._images(kwargs, ids_BL, identified=False)
        except (ValueError, TypeError, IndexError, RuntimeError, AttributeError):
            return False
        return int(ids_BL.max()) < self._config.get_text_config(decoder=True).vocab_size

    def _images(self, kwargs: Mapping[str, Any], ids_BL: Tensor, identified: bool) -> list[PromptImages]:
        return images_of_call({**kwargs, "input_ids": ids_BL}, self._config, identified)

    def separate_images(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[tuple[Any, ...], ...]]:
        """Return the arguments of a call that joins, and the images or sounds of its rows apart; see `Request`."""
        if self.sounds is not None:
            rest, sounds = self.sounds.separate(kwargs)
            return rest, tuple(map(tuple, sounds))
        rest = {name: value for name, value in kwargs.items() if name not in ARGUMENTS}
        if len(rest) == len(kwargs):
            return rest, ()
        ids_BL: Any = kwargs.get("input_ids")
        ids_BL = kwargs["inputs"] if ids_BL is None else ids_BL
        return rest, tuple(map(tuple, self._images(kwargs, ids_BL, identified=True)))


def unsupported_setting(kwargs: Mapping[str, Any], defaults: Any) -> str | None:
    """Return a setting of `generate` with its value that needs another decoding method, or ``None``.

    Args:
        kwargs, defaults: as for `Admission.joins`.
    """
    setting = settings_of(kwargs, defaults)
    return next((f"{name}={setting(name)!r}" for name, values in _NEUTRAL.items() if setting(name) not in values), None)


def reason_against(config: Any) -> str | None:
    """Return why no call of a model can join; ``None`` if calls can join."""
    kind = _kind(config)
    if kind not in registry.ARCHITECTURES:
        return "the running batch was not tested with models of its type"
    if kind in SINCE:
        return "older releases than transformers 5.24 compute it in other ways"
    if config.is_encoder_decoder:
        joins = kind in ENCODER_DECODERS or reads_sounds(config)
        return None if joins else CANNOT_JOIN.get(kind, "rows of encoder-decoders of its type were not tested")
    if getattr(type(config), "is_encoder_decoder", False) and kind not in ENCODER_DECODERS:
        return "the decoder alone of an encoder-decoder of its type was not tested"
    if getattr(config, "is_decoder", True) is False:
        return "it is an encoder: is_decoder=False in its configuration"
    text = config.get_text_config(decoder=True)
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        return "the first passes of its loop read the whole cache of the last pass (recurrent_kv_cache_mode last_loop)"
    kinds = set(getattr(text, "layer_types", None) or ()) - (BLOCKS if kind in WITH_STATES else set())
    return EXCLUSIVE.get(kind) or next(filter(None, (_KINDS.get(each, _STATES) for each in sorted(kinds))), None)


def _kind(config: Any) -> str:
    """Return the type of a model, for types with the classes of another type that one."""
    return str(registry.SAME_CLASSES.get(config.model_type, config.model_type))


def reason_against_padding(config: Any) -> str | None:
    """Return why padded rows of a model have other tokens in transformers; ``None`` if they have equal ones."""
    text = config.get_text_config(decoder=True)
    if getattr(type(config), "is_encoder_decoder", False) and not config.is_encoder_decoder:
        return "its positions count the padding"
    if has_states(config) and any(getattr(text, name, False) for name in _BIASES):
        return "its convolutions read the biases of padding"
    return READ_PADDING.get(_kind(config))


def reason_against_drafts(config: Any, length: int) -> str | None:
    """Return why rows of a model cannot have drafted tokens; ``None`` if they can.

    Args:
        length: maximum tokens of a row.
    """
    reason = reason_against(config)
    if reason is not None:
        return f"its calls do not join the running batch: {reason}"
    if getattr(type(config), "is_encoder_decoder", False):
        return "its decoder counts positions from the columns of the cache, and drafts leave empty columns"
    if has_states(config) and (_kind(config) in WITHOUT_DRAFTS or _kind(config) not in WITH_STATES):
        return "some of its blocks keep a state of all tokens, which cannot drop the drafted tokens that are wrong"
    text = config.get_text_config(decoder=True)
    window = _smallest_window(text)
    if window is not None and window < columns(length):
        return (
            f"some of its blocks attend to a window of {window} tokens, and rows of {length} tokens with drafts need "
            f"{columns(length)}"
        )
    return next((_BY_COLUMNS[each.model_type] for each in (config, text) if each.model_type in _BY_COLUMNS), None)


def reason_against_draft_model(config: Any, draft: Any, length: int) -> str | None:
    """Return why a model cannot draft for another one; ``None`` if it can.

    Args:
        config: of the other model.
        draft: the configuration of the model that drafts.
        length: maximum tokens of a row.
    """
    if draft.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return f"model_type={draft.model_type!r} is no language model"
    sizes = [each.get_text_config(decoder=True).vocab_size for each in (draft, config)]
    if sizes[0] != sizes[1]:
        return f"its vocabulary has {sizes[0]} tokens, and the vocabulary of the model {sizes[1]}"
    return reason_against_drafts(draft, length)


def _smallest_window(text: Any) -> int | None:
    """Return the smallest window or chunk of attention in a decoder; ``None`` if every block attends to all tokens."""
    kinds = getattr(text, "layer_types", None)
    if "local" in (getattr(text, "attention_layers", None) or ()):
        return int(text.window_size)
    if kinds is not None and not set(kinds) - _WITHOUT_WINDOW:
        return None
    sizes = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
    found = [int(size) for size in sizes if size is not None]
    return min(found, default=0 if kinds else None)


def longest(config: Any, limits: BatchLimits) -> int:
    """Return the maximum tokens of a row: the limit, or a smaller bound of the model."""
    return min([limits.length, *(count for _, count in bounds(config))])


def bounds(config: Any) -> list[tuple[str, int]]:
    """Return the settings of a decoder that bound the tokens of a row, with their values."""
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    found = [("max_position_embeddings", positions)]
    if reads_sounds(config):
        found.append(("max_target_positions", getattr(config, "max_target_positions", None)))
    if text.model_type == "inkling_text":  # beyond, it scales queries by the number of columns of the longest row
        found.append(("log_scaling_n_floor", text.log_scaling_n_floor))
    parameters = getattr(text, "rope_parameters", None) or {}
    for each in (parameters, *parameters.values()):  # one, or one for each kind of blocks
        kind = each.get("rope_type") if isinstance(each, Mapping) else None
        if kind == "longrope":  # beyond, the longest row of a batch changes the frequencies of all rows
            found.append(("original_max_position_embeddings", each.get("original_max_position_embeddings", positions)))
        if kind == "dynamic" and positions:  # likewise, and they change back below this number
            found.append(("max_position_embeddings - 1", positions - 1))
    return [(name, int(count)) for name, count in found if count]


def _is_batch(ids_BL: Any, rows: int) -> bool:
    """Return whether ``ids_BL`` holds token ids [B, L] with at most ``rows`` rows."""
    if not isinstance(ids_BL, Tensor) or ids_BL.dim() != 2 or ids_BL.is_floating_point() or ids_BL.is_complex():
        return False
    return 0 < len(ids_BL) <= rows and ids_BL.shape[1] > 0


def _is_padded(mask_BL: Any, ids_BL: Tensor, on_the_right: bool) -> bool:
    """Return whether a mask hides only the beginnings of rows, or only their ends."""
    if mask_BL is None:
        return True
    if not isinstance(mask_BL, Tensor) or mask_BL.shape != ids_BL.shape:
        return False
    shown_BL = mask_BL.bool().flip(1) if on_the_right else mask_BL.bool()
    return bool(shown_BL[:, -1].all() and (shown_BL[:, 1:] >= shown_BL[:, :-1]).all())


def _has_one_start(setting: Callable[[str], Any], ids_BL: Tensor, mask_BL: Any) -> bool:
    """Return whether all rows of a call of an encoder-decoder begin with one token, and none hides tokens as padding.

    Without a mask, some releases of transformers hide padding tokens from the encoder.
    """
    start, pad = setting("decoder_start_token_id"), setting("pad_token_id")
    start = setting("bos_token_id") if start is None else start
    return isinstance(start, int) and (mask_BL is not None or pad is None or not bool((ids_BL == pad).any()))


def default_limits(config: Any, length: int, gpus: int) -> BatchLimits:
    """Return the default limits.

    Args:
        config: of the model.
        length: maximum tokens of a row.
        gpus: number of GPUs that hold a part of the model; 0 for CPUs.
    """
    if not gpus:
        return DEFAULT_LIMITS
    size, rows, held = bytes_of_token(config), GPU_LIMITS.rows, columns(length)
    if reads_sounds(config):  # the columns of the decoder, and the ones of the encoder
        held = (held + columns(most_positions(config))) // 2
    while rows > DEFAULT_LIMITS.rows and (size is None or (rows + 1) * held * size > gpus * MOST_CACHE):
        rows //= 2
    return BatchLimits(rows, chunk=GPU_LIMITS.chunk)


def with_states(config: Any, limits: BatchLimits) -> BatchLimits:
    """Return the limits for a model that may have states, or an encoder; see `BatchLimits`."""
    if config.is_encoder_decoder:
        return replace(limits, splits=False, reuse=False)
    if not has_states(config):
        return replace(limits, pads=_kind(config) not in READ_PADDING)
    splits = _kind(config) not in IN_ONE_STEP
    return replace(limits, has_states=True, splits=splits, reuse=limits.reuse and splits)


def bytes_of_token(config: Any) -> int | None:
    """Return the bytes of the keys and values of one token, over all ranks; ``None`` if a block has none."""
    values = 0
    if has_states(config):
        return None
    attentions = 2 if config.is_encoder_decoder else 1  # each token may be one of the encoder, too
    try:
        for block in config.get_text_config(decoder=True).per_layer_config:
            heads = block.num_attention_heads
            width = getattr(block, "head_dim", None) or block.hidden_size // heads
            values += 2 * attentions * (getattr(block, "num_key_value_heads", None) or heads) * width
    except (AttributeError, TypeError):
        return None
    return values * (getattr(config, "dtype", None) or torch.get_default_dtype()).itemsize
