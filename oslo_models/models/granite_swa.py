"""Granite SWA: Granite with attention sinks, and sliding windows in most blocks."""

from typing import Any

from transformers import GraniteSWAConfig
from transformers.models.granite_swa import modeling_granite_swa as hf

from oslo_models.modeling.blocks import attention_sinks
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.granite import GraniteParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries


class GraniteSWAParallel(GraniteParallel):
    """Sharding plan of the Granite SWA family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.sinks": attention_sinks(heads)}


class GraniteSWAModel(GraniteSWAParallel, hf.GraniteSWAModel):
    pass


class GraniteSWAForCausalLM(GraniteSWAParallel, hf.GraniteSWAForCausalLM):
    head_plan = LM_HEAD
