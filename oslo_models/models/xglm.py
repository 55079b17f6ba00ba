"""XGLM: the decoder of BART, with sinusoidal positions."""

from typing import Any

from transformers import XGLMConfig
from transformers.models.xglm import modeling_xglm as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import bart_block
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.sharding.layout import EvenSplit


class XGLMParallel(ParallelModel):
    """Sharding plan of the XGLM family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = EvenSplit(config.attention_heads, config.d_model // config.attention_heads)
        local = LocalAttributes({"num_heads": heads.local_count, "embed_dim": heads.local_extent})
        attentions = ("self_attn", "encoder_attn") if config.add_cross_attention else ("self_attn",)
        block = {**bart_block(heads, *attentions), **dict.fromkeys(attentions, local)}
        return Plan(
            embed={"embed_tokens": VocabParallel(), "embed_positions": Replicated()},
            blocks={"layers": block},
            head={"layer_norm": Norm()},
        ).with_rules(disabled_after_first_stage={"dropout": 0.0})


class XGLMModel(XGLMParallel, hf.XGLMModel):
    pass


class XGLMForCausalLM(XGLMParallel, hf.XGLMForCausalLM):
    head_plan = LM_HEAD
