"""StableLM: Llama with layer norms, of which parallel residuals share one; some have one for each head."""

from dataclasses import replace
from typing import Any

from transformers.models.stablelm import modeling_stablelm as hf

from oslo_models.layout import GroupedHeads
from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Entries, HeadNorms, Plan


class StableLmParallel(LlamaParallel):
    """How every model of the StableLM family divides."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        norms = {"self_attn.q_layernorm": HeadNorms(heads.query), "self_attn.k_layernorm": HeadNorms(heads.key_value)}
        return {**super().attention(config, heads), **(norms if config.qk_layernorm else {})}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), optional=("post_attention_layernorm",))


globals().update(family(StableLmParallel, hf, DECODER))
