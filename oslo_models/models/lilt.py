"""LiLT: RoBERTa beside a narrower stream for the layout of the page; both share their attention scores."""

from dataclasses import replace
from typing import Any

from transformers import LiltConfig
from transformers.models.lilt import modeling_lilt as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.sharding.layout import EvenSplit


class LiltParallel(BertParallel):
    """Sharding plan of the LiLT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        narrow = EvenSplit(heads.count, heads.width // config.channel_shrink_ratio)
        (block,) = plan.blocks.values()
        layout = {
            "attention.self": LocalAttributes(
                {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
            ),
            **qkv("attention.self", narrow, ("layout_query", "layout_key", "layout_value")),
            "attention.layout_output.dense": RowParallel(narrow),
            "attention.layout_output.LayerNorm": Norm(),
            "layout_intermediate.dense": ColumnParallel(),
            "layout_output.dense": RowParallel(),
            "layout_output.LayerNorm": Norm(),
        }
        return replace(
            plan,
            embed={**plan.embed, "layout_embeddings": Replicated()},
            blocks={"encoder.layer": {**block, **layout}},
        ).with_rules(single_stage_reason="its blocks pass on hidden states of tokens and of their layout")


class LiltModel(LiltParallel, hf.LiltModel):
    pass


class LiltForSequenceClassification(LiltParallel, hf.LiltForSequenceClassification):
    head_plan = CLASSIFIER


class LiltForTokenClassification(LiltParallel, hf.LiltForTokenClassification):
    head_plan = CLASSIFIER


class LiltForQuestionAnswering(LiltParallel, hf.LiltForQuestionAnswering):
    head_plan = QA_OUTPUTS
