"""Phi-3: Llama with query, key and value in one matrix, gate and up in another."""

from dataclasses import replace
from typing import Any

from transformers.models.phi3 import modeling_phi3 as hf

from oslo_models.layout import GroupedHeads
from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Entries, Plan, Row


class Phi3Parallel(LlamaParallel):
    """How every model of the Phi-3 family divides."""

    mlp = {"mlp.gate_up_proj": Column(parts=2), "mlp.down_proj": Row()}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        qkv = Column(heads.query, heads.key_value, heads.key_value)
        return {"self_attn.qkv_proj": qkv, "self_attn.o_proj": Row(heads.query)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        local = {"self_attn.config.num_attention_heads": cls.heads(config).query.local_count}
        return replace(plan, local={**plan.local, **local})


globals().update(family(Phi3Parallel, hf, DECODER))
