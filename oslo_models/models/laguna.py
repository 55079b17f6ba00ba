"""Laguna: Qwen3 with gated attention, and shared and routed experts in all except the first blocks.

The number of query heads may differ between blocks.
"""

from dataclasses import replace
from typing import Any

from transformers import LagunaConfig
from transformers.models.laguna import modeling_laguna as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.dots1 import Dots1Parallel
from oslo_models.sharding.layout import GroupedHeads


class LagunaParallel(Dots1Parallel):
    """Sharding plan of the Laguna family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        gates = replace(heads, head_dim=1) if config.gating in (True, "per-head") else heads  # as transformers decides
        return {**super().attention(config, heads), "self_attn.g_proj": ColumnParallel(gates.query)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = [replace(cls.heads(config), query_heads=count) for count in config.num_attention_heads_per_layer]
        return replace(super().plan(config), block_overrides={"layers": [cls.attention(config, own) for own in heads]})


class LagunaModel(LagunaParallel, hf.LagunaModel):
    pass


class LagunaForCausalLM(LagunaParallel, hf.LagunaForCausalLM):
    head_plan = LM_HEAD
