"""Fused and unfused models generate the tokens of transformers from its cache, under its name in any release."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GPT2Config, LlamaConfig
from transformers.models.gpt2.modeling_gpt2 import GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from oslo_models import registry
from oslo_models.cache_argument import cache_name, generation_name, name_in_model, take_cache
from oslo_models.fusion.decoder_blocks import DecodingBlock
from oslo_models.fusion.module_context import mixed
from oslo_models.fusion.rotary_attention import FusedLlamaAttention

from support import zoo
from support.float64 import lifted_casts
from support.reference import reference_model

NAMES = {
    "bart": "BartForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_neox": "GPTNeoXForCausalLM",
    "gptj": "GPTJForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "t5": "T5ForConditionalGeneration",
}
NEW = 24


def generated(model: Any, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Generate from left-padded prompts; return the new tokens and their logits."""
    with lifted_casts():
        output = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert output[generation_name()].get_seq_length() >= NEW - 1  # the last token has no keys yet
    return output.sequences[:, -NEW:], torch.stack(output.logits, 1)


@pytest.mark.drawn(8)
@pytest.mark.stacks
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("model_type", NAMES)
def test_tokens_equal_transformers(model_type: str, dtype: torch.dtype, seed: int) -> None:
    name, config = NAMES[model_type], zoo.config(model_type)
    options = {"experts_implementation": "eager"} if model_type == "mixtral" else {}  # grouped products take no float64
    right = reference_model(name, config, seed, dtype, **options).eval()
    with torch.no_grad():
        for param in right.parameters():  # makes tokens depend on earlier tokens
            param.mul_(2)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, config.vocab_size, (3, 8), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :6] = 0
    tokens, logits = generated(right, ids, mask)
    cls: Any = registry.find(name)
    model = cls.from_pretrained(None, config=config, state_dict=right.state_dict(), dtype=dtype, **options).eval()
    tolerance = 1e-10 if dtype is torch.float64 else 1e-3
    for fused in (False, True):
        own_tokens, own_logits = generated(model.fuse(measure=False) if fused else model, ids, mask)
        assert torch.equal(own_tokens, tokens), fused
        torch.testing.assert_close(own_logits, logits, rtol=tolerance, atol=tolerance)


# Other spellings ------------------------------------------------------------------------------------------------------


class Renamed(LlamaAttention):
    """Like a release that renames the argument again."""

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any = None, kv: Any = None, **kwargs: Any
    ) -> Any:
        raise AssertionError("the fused forward is used")


def attention(cls: Any) -> tuple[Any, dict[str, Any]]:
    config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1, attn_implementation="sdpa")
    layer = mixed(FusedLlamaAttention, cls)(config, 0)
    layer.own_config = config
    x = torch.ones(1, 1, 8)
    tables = LlamaRotaryEmbedding(config)(x, torch.zeros(1, 1, dtype=torch.long))
    return layer, {"hidden_states": x, "position_embeddings": tables, "attention_mask": None}


@torch.no_grad()
def test_a_layer_with_a_cache_of_unknown_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedLlamaAttention, "config", property(lambda layer: layer.own_config, lambda layer, _: None))
    layer, given = attention(Renamed)
    with pytest.raises(TypeError, match=r"Renamed.forward takes a cache by an unknown argument.*kv.*unfuse"):
        layer(**given, kv=DynamicCache())


@torch.no_grad()
def test_a_cache_under_an_unknown_name_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FusedLlamaAttention, "config", property(lambda layer: layer.own_config, lambda layer, _: None))
    layer, given = attention(LlamaAttention)
    cache = DynamicCache()
    layer(**given, **{generation_name(): cache})
    assert cache.get_seq_length() == 1
    with pytest.raises(TypeError, match=r"LlamaAttention.forward got a cache as kv"):
        layer(**given, kv=cache)
    block = mixed(DecodingBlock, GPT2Block)(GPT2Config(n_embd=8, n_head=2, attn_implementation="sdpa"), layer_idx=0)
    with pytest.raises(TypeError, match=r"GPT2Block.forward got a cache as kv"):
        block(torch.ones(1, 1, 8), kv=cache)


def test_names_are_read_from_signatures() -> None:
    cache = DynamicCache()

    def old(self: Any, hidden_states: Tensor, past_key_values: Any = None, **kwargs: Any) -> None: ...

    def new(self: Any, hidden_states: Tensor, cache: Any = None, **kwargs: Any) -> None: ...

    def without(self: Any, hidden_states: Tensor, **kwargs: Any) -> None: ...

    def both(self: Any, hidden_states: Tensor, cache: Any = None, past_key_values: Any = None) -> None: ...

    assert cache_name(old) == "past_key_values" and cache_name(new) == "cache"
    for unclear in (without, both):
        with pytest.raises(TypeError, match="exactly one of cache, past_key_values, cache_params, layer_past"):
            cache_name(unclear)
    paged = nn.Identity()  # up to 5.23, `cache` is a paged cache for the attention function
    arguments = {"past_key_values": cache, "cache": paged}
    assert take_cache(old, arguments) is cache and arguments == {"cache": paged}
    arguments = {"past_key_values": cache}
    assert take_cache(new, arguments) is cache and not arguments
    assert name_in_model(without, {"state": 1}) is None and name_in_model(new, {"cache": cache}) == "cache"
    assert name_in_model(without, {"kv": cache}) is None  # in **kwargs: generate makes a cache for any model

    def unknown(self: Any, hidden_states: Tensor, kv: Any = None) -> None: ...

    with pytest.raises(TypeError, match="got a cache as kv"):
        name_in_model(unknown, {"kv": cache})
