"""Gemma 4, its text model: Gemma 3 with other heads in full-attention blocks; some sizes have experts beside the MLP.

In small sizes, each block has an additional input, which every rank computes in full, or reuses keys of an earlier
block.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import Gemma4TextConfig
from transformers.models.gemma4 import modeling_gemma4 as hf

from oslo_models.layers.entries import Entries, Experts, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.gemma3_text import Gemma3Parallel
from oslo_models.sharding.layout import GroupedHeads


class Gemma4Parallel(Gemma3Parallel):
    """Sharding plan of the Gemma 4 family."""

    norms = (
        *Gemma3Parallel.norms,
        *("post_feedforward_layernorm_1", "pre_feedforward_layernorm_2", "post_feedforward_layernorm_2"),
        "post_per_layer_input_norm",
    )
    mlp = {
        **Gemma3Parallel.mlp,
        "router": Replicated(),
        "experts": Experts(),
        "per_layer_input_gate": Replicated(),
        "per_layer_projection": Replicated(),
    }
    inputs_of_blocks: Entries = {
        "embed_tokens_per_layer": VocabParallel(),
        "per_layer_model_projection": Replicated(),
        "per_layer_projection_norm": Norm(),
    }
    optional = (
        *("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm", *inputs_of_blocks),
        *(name for name in (*norms[4:], *mlp) if not name.startswith("mlp.")),
    )

    @classmethod
    def heads(cls, config: Any, block: int = 0) -> GroupedHeads:
        """Return the attention heads of a block."""
        own = config.per_layer_config[block]
        return GroupedHeads(config.num_attention_heads, own.num_key_value_heads, own.head_dim)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, count = super().plan(config), config.num_hidden_layers
        given = ("hidden_size_per_layer_input", "num_kv_shared_layers")
        shared = [f"{name}={value}" for name in given if (value := getattr(config, name, 0))]
        return replace(
            plan,
            embed={**plan.embed, **cls.inputs_of_blocks},
            block_overrides={"layers": [cls.attention(config, cls.heads(config, i)) for i in range(count)]},
        ).with_rules(single_stage_reason=f"with {shared[0]}, blocks need what earlier modules made" if shared else "")


class Gemma4TextModel(Gemma4Parallel, hf.Gemma4TextModel):
    pass


class Gemma4ForCausalLM(Gemma4Parallel, hf.Gemma4ForCausalLM):
    head_plan = LM_HEAD
