"""TrOCR: the decoder of BART, for the text in images."""

from dataclasses import replace
from typing import Any

from transformers import TrOCRConfig
from transformers.models.trocr import modeling_trocr as hf

from oslo_models.layers.entries import LocalAttributes, Plan, Replicated, VocabParallel
from oslo_models.models.bart import BartParallel
from oslo_models.sharding.layout import EvenSplit


class TrOCRParallel(BartParallel):
    """Sharding plan of the TrOCR family."""

    stacks = ("decoder",)

    @classmethod
    def block(cls, heads: EvenSplit, *attentions: str) -> dict[str, Replicated]:
        local = LocalAttributes({"num_heads": heads.local_count}, width=heads)
        return super().block(heads, *attentions) | dict.fromkeys(attentions, local)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), optional=("embed_positions", "layernorm_embedding"))


class TrOCRForCausalLM(TrOCRParallel, hf.TrOCRForCausalLM):
    head_plan = {"output_projection": VocabParallel()}
