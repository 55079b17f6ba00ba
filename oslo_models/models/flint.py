"""Flint: Qwen3 MoE with attention sinks, sliding windows and a shared expert."""

from typing import Any

from transformers import FlintConfig
from transformers.models.flint import modeling_flint as hf

from oslo_models.modeling.blocks import attention_sinks, mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_moe import Qwen3MoeParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries


class FlintParallel(Qwen3MoeParallel):
    """Sharding plan of the Flint family."""

    mlp = {**Qwen3MoeParallel.mlp, **mixture_of_experts(shared="shared_expert")}
    optional = tuple(mlp)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.sinks": attention_sinks(heads)}


class FlintModel(FlintParallel, hf.FlintModel):
    pass


class FlintForCausalLM(FlintParallel, hf.FlintForCausalLM):
    head_plan = LM_HEAD
