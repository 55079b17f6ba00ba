"""Tiny models of every architecture of the zoo, with sizes that no power of two divides, and a batch for each class.

A new architecture adds a line to `VARIANTS` under its model type; its classes come from the registry by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from oslo_models import registry

TOKENS = {"vocab_size": 101, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_GPT2: dict[str, Any] = {"n_embd": 24, "n_inner": 35, "n_layer": 2, "n_head": 6, "n_positions": 32}
_GPT_NEO: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_layers": 2, "num_heads": 6, "max_position_embeddings": 32},
    **{"attention_types": [[["global", "local"], 1]], "window_size": 4},
}
_GPTJ: dict[str, Any] = {**_GPT2, "rotary_dim": 4, "tie_word_embeddings": False}
_LLAMA: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 6},
    **{"num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True},
}
_BERT: dict[str, Any] = {
    **{"hidden_size": 24, "intermediate_size": 35, "num_hidden_layers": 2, "num_attention_heads": 6},
    "max_position_embeddings": 32,
}
_T5: dict[str, Any] = {
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 35,
    "num_layers": 2,
    "num_heads": 6,
    "decoder_start_token_id": 0,
}

VARIANTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    # the main variant of each architecture bears its name
    "bert": ("bert", _BERT),
    "bert-untied": ("bert", {**_BERT, "tie_word_embeddings": False}),
    "bert-decoder": ("bert", {**_BERT, "is_decoder": True, "add_cross_attention": True}),
    "gpt2": ("gpt2", _GPT2),
    "gpt2-untied": ("gpt2", {**_GPT2, "tie_word_embeddings": False, "scale_attn_by_inverse_layer_idx": True}),
    "gpt2-cross": ("gpt2", {**_GPT2, "add_cross_attention": True}),
    "gpt2-12-heads": ("gpt2", {**_GPT2, "n_embd": 48, "n_head": 12}),
    "gpt_neo": ("gpt_neo", _GPT_NEO),
    "gpt_neo-untied": ("gpt_neo", {**_GPT_NEO, "tie_word_embeddings": False}),
    "gptj": ("gptj", _GPTJ),
    "gptj-tied": ("gptj", {**_GPTJ, "tie_word_embeddings": True}),
    "llama": ("llama", _LLAMA),  # 2 key-value heads: replicated on 3 ranks and on 4
    "llama-untied": ("llama", {**_LLAMA, "tie_word_embeddings": False, "num_key_value_heads": 6}),
    "llama-9-heads": ("llama", {**_LLAMA, "hidden_size": 27, "num_attention_heads": 9, "num_key_value_heads": 3}),
    "llama-one-kv": ("llama", {**_LLAMA, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "t5": ("t5", _T5),
    "t5-gated-untied": ("t5", {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
}


def config(variant: str, dropout: float = 0.0, **changes: Any) -> PreTrainedConfig:
    """A configuration; all of its dropout rates are ``dropout``."""
    model_type, values = VARIANTS[variant]
    made = CONFIG_MAPPING[model_type](**{**TOKENS, **values, **changes})
    made.classifier_dropout = dropout  # else 0.1 where a configuration does not know it
    for key, value in made.to_dict().items():
        if "drop" in key and "layerdrop" not in key and not isinstance(value, (bool, str)):
            setattr(made, key, dropout)
    return made


def heads(variant: str) -> list[str]:
    """The names of all classes of the architecture."""
    return list(registry.model_classes(VARIANTS[variant][0]))


def lm_heads(variant: str) -> list[str]:
    """The names of the classes with logits over the vocabulary."""
    endings = (
        "LMHeadModel",
        "DoubleHeadsModel",
        "ForCausalLM",
        "ForMaskedLM",
        "ForPreTraining",
        "ForConditionalGeneration",
    )
    return [name for name in heads(variant) if name.endswith(endings)]


def lm_head(variant: str) -> str:
    """The name of the class that generates text."""
    return next(name for name in lm_heads(variant) if "DoubleHeads" not in name and original(name).can_generate())


def base(variant: str) -> str:
    """The name of the class without a head."""
    return f"{registry.ARCHITECTURES[VARIANTS[variant][0]]}Model"


def original(name: str) -> type[PreTrainedModel]:
    """The transformers class of the same name."""
    found = registry.find(name).__mro__  # type: ignore[attr-defined]
    return next(cls for cls in found if cls.__name__ == name and cls.__module__.startswith("transformers."))


def parameters_of_forward(name: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(original(name).forward).parameters


def batch(name: str, config: PreTrainedConfig, seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What the forward of a class can be given: left padding, types of tokens, labels of which some do not count."""
    known = parameters_of_forward(name)
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows, length, vocab = 3, 9, config.vocab_size
    choices = (2,) if name.endswith(("MultipleChoice", "DoubleHeadsModel")) else ()
    shape = (rows, *choices, length)
    ids, mask = integers(3, vocab, *shape), torch.ones(shape, dtype=torch.long)
    ids[1, ..., 1], ids[2, ..., 2] = vocab - 1, 2  # the last word, and one that no row draws
    if config.is_encoder_decoder:
        ids[..., -1] = config.eos_token_id  # as often in each row: T5ForSequenceClassification wants that
    for row, padding in enumerate((3, 0, 1)):
        ids[row, ..., :padding] = config.pad_token_id
        mask[row, ..., :padding] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if "token_type_ids" in known:
        given["token_type_ids"] = integers(0, 2, *shape)
    if getattr(config, "add_cross_attention", False) and "encoder_hidden_states" in known:
        states = torch.randn(rows, 5, config.hidden_size, generator=generator, dtype=dtype)
        given |= {"encoder_hidden_states": states, "encoder_attention_mask": torch.ones(rows, 5, dtype=torch.long)}
        given["encoder_attention_mask"][1, 3:] = 0

    words = torch.where(integers(0, 4, *shape) > 0, integers(0, vocab, *shape), -100).masked_fill(mask == 0, -100)
    words[0, ..., -1], words[1, ..., -2] = vocab - 1, 0
    if name in lm_heads(config.model_type):
        given["labels"] = words
        given |= {key: integers(0, 2, rows) for key in ("mc_labels", "next_sentence_label") if key in known}
    elif "start_positions" in known:
        given |= {"start_positions": integers(0, length, rows), "end_positions": integers(0, length, rows)}
    elif "labels" in known:
        given["labels"] = integers(0, 2, rows, length) if "ForToken" in name else integers(0, 2, rows)
    elif "decoder_input_ids" in known:
        given["decoder_input_ids"] = integers(0, vocab, rows, length - 2)
    if "decoder_attention_mask" in known:
        side = given.get("decoder_input_ids", ids)
        given["decoder_attention_mask"] = torch.ones_like(side)
        given["decoder_attention_mask"][2, -2:] = 0
    return given
