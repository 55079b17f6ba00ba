"""Phi-3: Llama with query, key and value in one matrix, gate and up projection in another."""

from typing import Any

from transformers import Phi3Config
from transformers.models.phi3 import modeling_phi3 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, RowParallel
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class Phi3Parallel(LlamaParallel):
    """Sharding plan of the Phi-3 family."""

    mlp = gated_mlp("mlp", fused=True)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        qkv = ColumnParallel(heads.query, heads.key_value, heads.key_value)
        local = {**cls.local_attributes(heads), "config.num_attention_heads": heads.query.local_count}
        return {
            "self_attn": LocalAttributes(local),
            "self_attn.qkv_proj": qkv,
            "self_attn.o_proj": RowParallel(heads.query),
        }


class Phi3Model(Phi3Parallel, hf.Phi3Model):
    pass


class Phi3ForCausalLM(Phi3Parallel, hf.Phi3ForCausalLM):
    head_plan = LM_HEAD


class Phi3ForSequenceClassification(Phi3Parallel, hf.Phi3ForSequenceClassification):
    head_plan = SCORE


class Phi3ForTokenClassification(Phi3Parallel, hf.Phi3ForTokenClassification):
    head_plan = SCORE
