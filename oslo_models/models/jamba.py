"""Jamba: Llama without positions, with Mamba mixers in place of most attentions, and experts in some blocks."""

from dataclasses import replace
from typing import Any

from transformers import JambaConfig
from transformers.models.jamba import modeling_jamba as hf

from oslo_models.modeling.blocks import gated_mlp, mixture_of_experts, selective_scan
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries, Norm, Plan


class JambaParallel(LlamaParallel):
    """Sharding plan of the Jamba family."""

    norms = ("input_layernorm", "pre_ff_layernorm")
    mlp = {**gated_mlp("feed_forward"), **mixture_of_experts("feed_forward", "router")}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), **selective_scan("mamba", normed=True)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        either = tuple(cls.attention(config, cls.heads(config)))
        return replace(super().plan(config), head={"final_layernorm": Norm()}, optional=(*cls.mlp, *either))


class JambaModel(JambaParallel, hf.JambaModel):
    pass


class JambaForCausalLM(JambaParallel, hf.JambaForCausalLM):
    head_plan = LM_HEAD


class JambaForSequenceClassification(JambaParallel, hf.JambaForSequenceClassification):
    head_plan = SCORE
