"""Hunyuan 4: GLM-5 with gated attention, attention sinks and several streams of hidden states, as in DeepSeek-V4.

Every rank computes the weights of the streams (hyper-connections) in full, because they read whole hidden states.
"""

from typing import Any

from transformers import HYV4Config
from transformers.models.hy_v4 import modeling_hy_v4 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated
from oslo_models.modeling.blocks import attention_sinks, of_several_streams
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.glm_moe_dsa import GlmMoeDsaParallel
from oslo_models.sharding.layout import EvenSplit, GroupedHeads


class HYV4Parallel(GlmMoeDsaParallel):
    """Sharding plan of the Hunyuan 4 family."""

    mlp = {**GlmMoeDsaParallel.mlp, **dict.fromkeys(("attn_hc", "ffn_hc"), Replicated())}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {
            **super().attention(config, heads),
            "self_attn.gate_proj": ColumnParallel(EvenSplit(config.num_attention_heads, config.v_head_dim)),
            "self_attn.sinks": attention_sinks(heads),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return of_several_streams(plan, {**plan.head, "hc_head": Replicated()})


class HYV4Model(HYV4Parallel, hf.HYV4Model):
    pass


class HYV4ForCausalLM(HYV4Parallel, hf.HYV4ForCausalLM):
    head_plan = LM_HEAD
