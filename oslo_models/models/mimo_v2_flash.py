"""MiMo-V2-Flash: Llama with experts and narrower values; sliding-window blocks have sinks and more heads of keys."""

from dataclasses import replace
from typing import Any

from transformers import MiMoV2FlashConfig
from transformers.models.mimo_v2_flash import modeling_mimo_v2_flash as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, RowParallel
from oslo_models.modeling.blocks import attention_sinks, mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class MiMoV2FlashParallel(LlamaParallel):
    """Sharding plan of the MiMo-V2-Flash family."""

    mlp = {**LlamaParallel.mlp, **mixture_of_experts()}
    optional = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        values = replace(heads, head_dim=config.v_head_dim)
        narrower = {
            "self_attn.v_proj": ColumnParallel(values.key_value),
            "self_attn.o_proj": RowParallel(values.query),
        }
        return {**super().attention(config, heads), **narrower}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        sliding = replace(cls.heads(config), kv_heads=2 * config.num_key_value_heads)
        own = {**cls.attention(config, sliding), "self_attn.sinks": attention_sinks(sliding)}
        overrides = [own if kind == "sliding_attention" else {} for kind in config.layer_types]
        return replace(super().plan(config), block_overrides={"layers": overrides})


class MiMoV2FlashModel(MiMoV2FlashParallel, hf.MiMoV2FlashModel):
    pass


class MiMoV2FlashForCausalLM(MiMoV2FlashParallel, hf.MiMoV2FlashForCausalLM):
    head_plan = LM_HEAD
