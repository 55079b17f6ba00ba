"""Attention layers under `fuse`: exact against transformers in each of their forms, and no other model changes."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oslo_models import registry
from oslo_models.fusion import attention, known_layers, rotary_attention
from oslo_models.fusion.rules import fusion_candidates
from oslo_models.fusion.swap import Fusion

from support import zoo
from support.float64 import lifted_casts
from support.fusion import fusion_reference, gpt2
from support.pool import Pool
from support.reference import (
    TOLERANCE,
    Step,
    differences,
    full_parameters,
    parallel_model,
    step_differences,
    tensors,
)

ROTARY = sorted(
    {"gemma3": "gemma3_text"}.get(layer.split(".")[0], layer.split(".")[0])
    for layers in known_layers.ROTARY_ATTENTIONS.values()
    for layer in layers
)
CHANGES: dict[str, list[dict[str, Any]]] = {  # options of forwards that the zoo's configurations leave out
    "gemma2": [{"attn_logit_softcapping": 2.0}],
    "phi": [{"qk_layernorm": False, "partial_rotary_factor": 1.0}],
    "qwen3": [{"num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0}],
    "stablelm": [{"qk_layernorm": True}],
}


def swapped(model: Any, backend: str = "triton") -> Any:
    """Swap what is swapped on a GPU; operations are in plain torch on the CPU."""
    model._fusion = Fusion(backend)
    model._fusion.apply(model, fusion_candidates(model, backend), None)
    return model


def spied(module: Any, name: str) -> Any:
    return mock.patch.object(module, name, wraps=getattr(module, name))


def outputs(model: Any, batch: dict[str, Tensor], **more: Any) -> list[tuple[str, Tensor]]:
    with lifted_casts(), torch.no_grad():
        return list(tensors(model(**batch, **more)))


def inputs_of(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    given = {key: batch[key] for key in ("input_ids", "attention_mask") if key in batch}
    return given | ({"decoder_input_ids": given["input_ids"]} if model.config.is_encoder_decoder else {})


def check_rotary(step: Step, n: int) -> None:
    """Loss, gradients, eager weights and decoding with a cache are those of transformers."""
    model = swapped(parallel_model(step.name, step.config, step.weights, n))
    with spied(rotary_attention, "rotary") as rotary:
        lines = step_differences(model, step, without=("logits",))
    layers = [m for m in model.modules() if isinstance(m, rotary_attention.FusedLlamaAttention)]
    with_positions = sum(getattr(m, "use_rope", getattr(m, "is_sliding", True)) for m in layers)
    assert layers and rotary.call_count >= 2 * with_positions > 0
    model = parallel_model(step.name, step.config, step.weights, n, attn_implementation="eager").eval()
    batch = inputs_of(model, step.batch)
    expected, tokens = outputs(model, batch, output_attentions=True), decoded(model, batch)
    saved = model.config.to_dict()
    swapped(model)
    with spied(attention, "masked_softmax") as softmax, spied(rotary_attention, "rotary") as rotary:
        found = outputs(model, batch, output_attentions=True)
        lines += differences("decoded", decoded(model, batch), tokens, TOLERANCE)
    assert softmax.call_count and rotary.call_count
    assert any("attentions" in name for name, _ in found)
    for own, plain in zip(found, expected, strict=True):
        lines += differences(own[0], own[1], plain[1], TOLERANCE)
    assert model.config.to_dict() == saved and model.config._attn_implementation == "eager"
    assert not lines, "\n".join(lines)


def decoded(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The logits of the last tokens, which see the tokens before them through a cache."""
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with lifted_casts(), torch.no_grad():
        cache = model(input_ids=ids[:, :-2], attention_mask=mask[:, :-2], use_cache=True).past_key_values
        return model(input_ids=ids[:, -2:], attention_mask=mask, past_key_values=cache).logits


@pytest.mark.parametrize("variant", ROTARY)
def test_rotary_attention_matches_transformers(variant: str, seed: int) -> None:
    check_rotary(fusion_reference(variant, zoo.lm_head(variant), seed), 1)
