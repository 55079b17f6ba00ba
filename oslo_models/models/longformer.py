"""Longformer: RoBERTa with sliding-window attention, which is replicated: its code depends on the full hidden size."""

from dataclasses import replace
from typing import Any

from transformers import LongformerConfig
from transformers.models.longformer import modeling_longformer as hf

from oslo_models.modeling.blocks import replicated_attention
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.plan import Plan


class LongformerParallel(BertParallel):
    """Sharding plan of the Longformer family."""

    zeros = ("lm_head.bias",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = replicated_attention(super().plan(config), ("query_global", "key_global", "value_global"))
        return plan.with_rules(
            single_stage_reason="it pads its input to full windows, and removes the padding from its output"
        )


class LongformerModel(LongformerParallel, hf.LongformerModel):
    pass


class LongformerForMaskedLM(LongformerParallel, hf.LongformerForMaskedLM):
    head_plan = LM_HEAD


class LongformerForSequenceClassification(LongformerParallel, hf.LongformerForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class LongformerForMultipleChoice(LongformerParallel, hf.LongformerForMultipleChoice):
    head_plan = CLASSIFIER


class LongformerForTokenClassification(LongformerParallel, hf.LongformerForTokenClassification):
    head_plan = CLASSIFIER


class LongformerForQuestionAnswering(LongformerParallel, hf.LongformerForQuestionAnswering):
    head_plan = QA_OUTPUTS
