"""Compiled decoding attends by groups of heads, with the results of torch's attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from oslo_models import LlamaForCausalLM
from oslo_models.fusion import grouped_attention as grouped

from support.float64 import lifted_casts
from support.fusion import as_on_a_gpu


@pytest.mark.parametrize("mask", ["none", "shown", "added"])
@pytest.mark.parametrize(("heads", "keys", "width"), [(6, 2, 8), (4, 1, 5), (3, 3, 4)])
def test_results_equal_the_attention_of_torch(heads: int, keys: int, width: int, mask: str, seed: int) -> None:
    torch.manual_seed(seed)
    layer: Any = nn.Module()
    layer.num_key_value_groups = heads // keys
    query = torch.randn(3, heads, 1, width, dtype=torch.float64)
    key, value = (torch.randn(3, keys, 7, width, dtype=torch.float64) for _ in range(2))
    shown = torch.rand(3, 1, 1, 7) < 0.7
    shown[..., -1] = True
    given = {"none": None, "shown": shown, "added": torch.where(shown, 0.0, -1e9).double()}[mask]
    for scaling in (None, 0.3):
        found, weights = grouped.grouped_attention(layer, query, key, value, given, scaling=scaling)
        expected, _ = sdpa_attention_forward(layer, query, key, value, given, scaling=scaling)
        assert weights is None and found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_compiled_decoding_uses_it() -> None:
    """One captured step has the same logits as the eager step."""
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=61)
    model: Any = LlamaForCausalLM.from_config_with_parallel(config, dtype=torch.float64, seed=0).eval()
    ids, graphs = torch.randint(61, (2, 5)), []

    def logits(forward: Any) -> torch.Tensor:
        cache = StaticCache(config=config, max_cache_len=16)
        with torch.no_grad():
            model(ids, past_key_values=cache)
            mask = torch.ones(2, 6, dtype=torch.long)
            out: torch.Tensor = forward(ids[:, :1], past_key_values=cache, attention_mask=mask).logits
            return out

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    with lifted_casts():
        expected = logits(model)
        as_on_a_gpu(model)
        torch._dynamo.reset()
        found = logits(torch.compile(model, backend=keep))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert len(graphs) == 1 and "softmax" in graphs[0] and "scaled_dot_product_attention" not in graphs[0]
