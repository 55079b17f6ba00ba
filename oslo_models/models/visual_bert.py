"""VisualBERT: BERT that reads image regions after the text."""

from dataclasses import replace
from typing import Any

from transformers import VisualBertConfig
from transformers.models.visual_bert import modeling_visual_bert as hf

from oslo_models.layers.entries import Entries, Plan, Replicated
from oslo_models.models.bert import LM_HEAD, BertParallel

PRETRAINING: Entries = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class VisualBertParallel(BertParallel):
    """Sharding plan of the VisualBERT family. `bypass_transformer` is not supported."""

    added_embeddings = ("position", "token_type", "visual_position", "visual_token_type")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        embed = {**plan.embed, "embeddings.visual_projection": Replicated()}
        return replace(plan, embed=embed).with_rules(
            single_stage_reason="image regions are appended to the embedded tokens"
        )


class VisualBertModel(VisualBertParallel, hf.VisualBertModel):
    pass


class VisualBertForPreTraining(VisualBertParallel, hf.VisualBertForPreTraining):
    head_plan = PRETRAINING


class VisualBertForMultipleChoice(VisualBertParallel, hf.VisualBertForMultipleChoice):
    head_plan = {"cls": Replicated()}


class VisualBertForQuestionAnswering(VisualBertParallel, hf.VisualBertForQuestionAnswering):
    head_plan = {"cls": Replicated()}


class VisualBertForVisualReasoning(VisualBertParallel, hf.VisualBertForVisualReasoning):
    head_plan = {"cls": Replicated()}


class VisualBertForRegionToPhraseAlignment(VisualBertParallel, hf.VisualBertForRegionToPhraseAlignment):
    head_plan = {
        **PRETRAINING,
        "attention.query": Replicated(),
        "attention.key": Replicated(),
        "attention.value": Replicated(),
    }
