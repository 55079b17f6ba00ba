"""Attention functions of transformers with local heads: FlexAttention, packed rows, user-defined functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from support import zoo
from support.fusion import as_on_a_gpu
from support.pool import Pool
from support.reference import differences, full_parameters, parallel_model, reference_model

HEADS: list[tuple[int, int]] = []


def recorded_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stand-in for FlashAttention: records its numbers of heads, and computes the same result in torch."""
    HEADS.append((query.shape[1], key.shape[1]))
    causal = attention_mask is None
    attended = F.scaled_dot_product_attention(
        query, key, value, attention_mask, is_causal=causal, scale=kwargs["scaling"], enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous(), None


def check(name: str, config: Any, weights: Any, ids: Tensor, positions: Tensor, expected: Tensor, given: str) -> None:
    """On every rank, check that positions separate two texts in one row, with local heads, fused or not."""
    AttentionInterface.register("recorded", recorded_attention)
    AttentionMaskInterface.register("recorded", sdpa_mask)
    lines = []
    try:
        model = parallel_model(name, config, weights, 2, torch.float32, attn_implementation=given).eval()
        assert model.config._attn_implementation == given
        for fused in (False, True):
            model = as_on_a_gpu(model) if fused else model
            HEADS.clear()
            with torch.no_grad():
                logits = model(input_ids=ids, position_ids=positions).logits
            lines += differences(f"logits, fused={fused}", logits.double(), expected, 1e-5)
            local = (config.num_attention_heads // 2, config.num_key_value_heads // 2)
            wanted = [local] * config.num_hidden_layers if given == "recorded" else []
            lines += [] if wanted == HEADS else [f"heads: {HEADS}"]
    finally:
        for registry in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
            registry.pop("recorded")
    assert not lines, "\n".join(lines)


# FlexAttention compiles its masks even on a CPU, which takes a minute
@pytest.mark.parametrize("given", [pytest.param("flex_attention", marks=pytest.mark.zoo), "sdpa", "recorded"])
def test_attention_functions_get_the_heads_of_a_rank_and_packed_rows(pool: Pool, given: str, seed: int) -> None:
    name, config = zoo.lm_head("llama"), zoo.config("llama", use_cache=False)
    model = reference_model(name, config, seed).eval()
    texts = torch.randint(config.vocab_size, (1, 11), generator=torch.Generator().manual_seed(seed)).split((4, 7), 1)
    with torch.no_grad():
        expected = torch.cat([model(input_ids=ids).logits for ids in texts], 1)
    positions = torch.cat([torch.arange(ids.shape[1]) for ids in texts])[None]
    pool.run(2, check, name, config, full_parameters(model), torch.cat(texts, 1), positions, expected, given)
