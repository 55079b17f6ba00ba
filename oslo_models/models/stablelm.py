"""StableLM: Llama with layer norms, of which parallel residuals share one. Not with `qk_layernorm`."""

from dataclasses import replace
from typing import Any

from transformers.models.stablelm import modeling_stablelm as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Plan


class StableLmParallel(LlamaParallel):
    """How every model of the StableLM family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        if config.qk_layernorm:
            raise ValueError("qk_layernorm=True of StableLmConfig (a module for each head) cannot be divided yet")
        return replace(super().plan(config), optional=("post_attention_layernorm",))


globals().update(family(StableLmParallel, hf, DECODER))
