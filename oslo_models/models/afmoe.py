"""AFMoE (Trinity): Qwen3 with gated attention, four norms per block, and shared and routed experts."""

from dataclasses import replace
from typing import Any

from transformers import AfmoeConfig
from transformers.models.afmoe import modeling_afmoe as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3 import Qwen3Parallel
from oslo_models.sharding.layout import GroupedHeads


class AfmoeParallel(Qwen3Parallel):
    """Sharding plan of the AFMoE family."""

    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    mlp = {
        **LlamaParallel.mlp,
        **mixture_of_experts(router="router", shared="shared_experts"),
        "mlp.expert_bias": Replicated(),
    }
    optional = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.gate_proj": ColumnParallel(heads.query)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(disabled_after_first_stage={"config.mup_enabled": False})


class AfmoeModel(AfmoeParallel, hf.AfmoeModel):
    pass


class AfmoeForCausalLM(AfmoeParallel, hf.AfmoeForCausalLM):
    head_plan = LM_HEAD
