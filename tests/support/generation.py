"""Generates tokens without sampling, and compares them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from support.float64 import lifted_casts
from support.input_names import IMAGES, SOUNDS
from support.reference import reference_model

GREEDY = {"greedy": {"num_beams": 1}}

BEAMS = {**GREEDY, "beams": {"num_beams": 3}}

Tokens = dict[str, Tensor]


def generate_tokens(model: Any, batch: dict[str, Any], ways: dict[str, dict[str, int]]) -> Tokens:
    """Return the tokens that a model generates for the prompt of a batch, by search method."""
    names = (
        "input_ids",
        model.main_input_name,
        "attention_mask",
        "context_input_ids",
        "context_attention_mask",
        "doc_scores",
    )
    sees = {"flattened_patches", "image_pixel_values", "pixel_values"} & batch.keys()
    images = (*IMAGES, "token_type_ids") if sees else ()
    prompt = {key: batch[key] for key in (*names, *images, *SOUNDS) if key in batch}
    if hasattr(model.config, "audio_length_per_tok"):  # Voxtral Realtime generates the tokens of the rest of the sound
        prompt |= {key: prompt[key][:, :6] for key in ("input_ids", "attention_mask") if key in prompt}
    if "image_pixel_values" in prompt:  # transformers takes placeholders among new tokens for further images and sounds
        config = model.config
        prompt["suppress_tokens"] = [config.vision_config.image_token_id, config.audio_config.audio_token_id]
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # its running statistics depend on the training steps before
            module.train().track_running_stats = False
    with lifted_casts():
        return {way: model.generate(**prompt, **ways[way], do_sample=False, max_new_tokens=5) for way in ways}


def depend_on_rounding(
    name: str, config: Any, seed: int, batch: dict[str, Any], tokens: Tokens, ways: dict[str, dict[str, int]]
) -> bool:
    """Return whether the tokens of a model that chooses blocks of keys change with rounding errors of the weights.

    Padded positions have equal keys, so blocks of them have equal scores, and rounding chooses among these blocks.

    Args:
        name, config, seed: of the `reference_model`.
        tokens: the tokens without the errors.
    """
    if not tokens or not hasattr(config.get_text_config(decoder=True), "index_topk_blocks"):
        return False
    for draw in range(4):
        model, generator = reference_model(name, config, seed), torch.Generator().manual_seed(draw)
        with torch.no_grad():
            for param in model.parameters():
                param *= 1 + 1e-14 * torch.randn(param.shape, generator=generator, dtype=param.dtype)
        found = generate_tokens(model, batch, ways)
        if any(not torch.equal(found[way], tokens[way]) for way in tokens):
            return True
    return False


def token_differences(
    model: Any, batch: dict[str, Any], expected: Tokens, ways: dict[str, dict[str, int]]
) -> list[str]:
    """Return a line for each search method with unexpected tokens."""
    own = generate_tokens(model, batch, ways) if expected else {}
    return [
        f"{way}: {own[way].tolist()} instead of {tokens.tolist()}"
        for way, tokens in expected.items()
        if not torch.equal(own[way], tokens)
    ]
