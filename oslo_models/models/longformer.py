"""Longformer: RoBERTa that attends to windows; its attention counts on the width of all heads and is not divided."""

from dataclasses import replace
from typing import Any

from transformers import initialization as init
from transformers.models.longformer import modeling_longformer as hf

from oslo_models.models.bert import BertParallel
from oslo_models.models.family import family, whole_attention
from oslo_models.models.roberta import HEADS
from oslo_models.plan import Plan


class LongformerParallel(BertParallel):
    """How every model of the Longformer family divides."""

    def initialize_constructed(self) -> None:
        if hasattr(self, "lm_head"):
            init.zeros_(self.lm_head.bias)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = whole_attention(super().plan(config), ("query_global", "key_global", "value_global"))
        return replace(plan, one_stage="it lengthens its input to whole windows, and shortens what it made of it")


globals().update(family(LongformerParallel, hf, HEADS))
