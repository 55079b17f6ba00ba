"""Donut's encoder: Swin without a norm after its blocks."""

from dataclasses import replace
from typing import Any

from transformers import DonutSwinConfig
from transformers.models.donut import modeling_donut_swin as hf

from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, RowParallel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.swin import SwinParallel
from oslo_models.sharding.layout import EvenSplit


class DonutSwinParallel(SwinParallel):
    """Sharding plan of the Donut encoders."""

    @classmethod
    def block(cls, heads: EvenSplit) -> Entries:
        local = {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
        return {
            "layernorm_before": Norm(),
            "attention.self": LocalAttributes(local),
            **qkv("attention.self", heads, QUERY_KEY_VALUE),
            "attention.self.relative_position_bias_table": ColumnParallel(EvenSplit(heads.count), dim=1),
            "attention.output.dense": RowParallel(heads),
            "layernorm_after": Norm(),
            "intermediate.dense": ColumnParallel(),
            "output.dense": RowParallel(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return replace(super().plan(config), head={})


class DonutSwinModel(DonutSwinParallel, hf.DonutSwinModel):
    pass


class DonutSwinForImageClassification(DonutSwinParallel, hf.DonutSwinForImageClassification):
    head_plan = CLASSIFIER
