"""VisualBERT: BERT that reads regions of an image after the words."""

from dataclasses import replace
from typing import Any

from transformers import VisualBertConfig
from transformers.models.visual_bert import modeling_visual_bert as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Entries, Norm, Plan, Replicated, VocabParallel

PRETRAINING: Entries = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class VisualBertParallel(BertParallel):
    """How every model of the VisualBERT family divides. Not with `bypass_transformer`."""

    tables = ("position", "token_type", "visual_position", "visual_token_type")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        embed = {**plan.embed, "embeddings.visual_projection": Replicated()}
        return replace(plan, embed=embed, one_stage="the regions join the words after these are embedded")


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
        "cls.predictions.transform.dense": Replicated(),
        "cls.predictions.transform.LayerNorm": Norm(),
        "cls.predictions.decoder": VocabParallel(),
        "cls.predictions.bias": VocabParallel(),
        "cls.seq_relationship": Replicated(),
        "attention.query": Replicated(),
        "attention.key": Replicated(),
        "attention.value": Replicated(),
    }
