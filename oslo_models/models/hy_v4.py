"""Hunyuan 4: GLM-5 with gated attention, attention sinks and several streams of hidden states.

The connections of the streams read whole hidden states and have few weights: they are replicated.
"""

from typing import Any

from transformers import HYV4Config
from transformers.models.hy_v4 import modeling_hy_v4 as hf
from transformers.models.hy_v4.modeling_hy_v4 import HYV4PreTrainedModel

from oslo_models.modeling.blocks import attention_sinks
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.glm_moe_dsa import GlmMoeDsaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads
from oslo_models.sharding.plan import ColumnParallel, Entries, Plan, Replicated


class HYV4Parallel(GlmMoeDsaParallel):
    """Sharding plan of the Hunyuan 4 family."""

    mlp = {**GlmMoeDsaParallel.mlp, "attn_hc": Replicated(), "ffn_hc": Replicated()}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        gate = ColumnParallel(EvenSplit(config.num_attention_heads, config.v_head_dim))
        sinks = attention_sinks(heads)
        return {**super().attention(config, heads), "self_attn.gate_proj": gate, "self_attn.sinks": sinks}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        plan.head["hc_head"] = Replicated()
        return plan


class HYV4Model(HYV4Parallel, hf.HYV4Model):
    pass


class HYV4ForCausalLM(HYV4Parallel, hf.HYV4ForCausalLM):
    head_plan = LM_HEAD
