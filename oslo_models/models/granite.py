"""Granite: Llama with multipliers of embeddings, residuals, attention scores and logits."""

from dataclasses import replace
from typing import Any

from transformers import GraniteConfig
from transformers.models.granite import modeling_granite as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.sharding.plan import Plan


class GraniteParallel(LlamaParallel):
    """Sharding plan of the Granite family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(disabled_after_first_stage={"embedding_multiplier": 1.0})


class GraniteModel(GraniteParallel, hf.GraniteModel):
    pass


class GraniteForCausalLM(GraniteParallel, hf.GraniteForCausalLM):
    head_plan = LM_HEAD
