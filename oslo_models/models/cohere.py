"""Cohere: Llama with parallel attention and MLP, and query and key norms with weights for each head."""

from dataclasses import replace
from typing import Any

from transformers import CohereConfig
from transformers.models.cohere import modeling_cohere as hf

from oslo_models.layers.entries import Entries, HeadNorm
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.layout import GroupedHeads


class CohereParallel(LlamaParallel):
    """Sharding plan of the Cohere family."""

    norms = ("input_layernorm",)

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        entries = dict(super().attention(config, heads))
        if config.use_qk_norm:
            entries["self_attn.q_norm"] = HeadNorm(replace(heads, head_dim=1).query)
            entries["self_attn.k_norm"] = HeadNorm(replace(heads, head_dim=1).key_value)
        return entries


class CohereModel(CohereParallel, hf.CohereModel):
    pass


class CohereForCausalLM(CohereParallel, hf.CohereForCausalLM):
    head_plan = LM_HEAD
