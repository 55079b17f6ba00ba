"""Lara Mini: Qwen3.5 with attention without gates, and shared and routed experts in all blocks."""

from typing import Any

from transformers import LaraMiniConfig
from transformers.models.lara_mini import modeling_lara_mini as hf

from oslo_models.layers.entries import Entries
from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen3_5_text import Qwen3_5Parallel
from oslo_models.sharding.layout import GroupedHeads


class LaraMiniParallel(Qwen3_5Parallel):
    """Sharding plan of the Lara Mini family."""

    mlp = {**mixture_of_experts(shared="shared_expert")}

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**LlamaParallel.attention(config, heads), **cls.linear_attention(config)}


class LaraMiniModel(LaraMiniParallel, hf.LaraMiniModel):
    pass


class LaraMiniForCausalLM(LaraMiniParallel, hf.LaraMiniForCausalLM):
    head_plan = LM_HEAD
