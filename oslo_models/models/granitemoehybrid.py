"""Granite 4: Granite with Mamba-2 mixers in place of attention in most blocks, and optionally routed experts."""

from dataclasses import replace
from typing import Any

from transformers import GraniteMoeHybridConfig
from transformers.models.granitemoehybrid import modeling_granitemoehybrid as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bamba import BambaParallel
from oslo_models.models.granitemoeshared import GraniteMoeSharedParallel
from oslo_models.sharding.layout import GroupedHeads
from oslo_models.sharding.plan import Entries, Plan


class GraniteMoeHybridParallel(GraniteMoeSharedParallel):
    """Sharding plan of the Granite 4 family."""

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), **BambaParallel.mixer(config)}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        either = tuple(cls.attention(config, cls.heads(config)))
        return replace(super().plan(config), optional=(*cls.mlp, *either))


class GraniteMoeHybridModel(GraniteMoeHybridParallel, hf.GraniteMoeHybridModel):
    pass


class GraniteMoeHybridForCausalLM(GraniteMoeHybridParallel, hf.GraniteMoeHybridForCausalLM):
    head_plan = LM_HEAD
