"""RoFormer: BERT with rotary positions and factorised embeddings."""

from dataclasses import replace
from typing import Any

from transformers import RoFormerConfig
from transformers.models.roformer import modeling_roformer as hf

from oslo_models.layers.entries import Plan, Replicated, SharedOutput
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD
from oslo_models.models.electra import ElectraParallel


class RoFormerParallel(ElectraParallel):
    """Sharding plan of the RoFormer family."""

    added_embeddings = ("token_type",)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        # Since 5.24, transformers trains the table of positions. The heads of all ranks read it.
        return super().plan(config).with_rules(on_every_stage={"encoder.embed_positions": SharedOutput()})


class RoFormerModel(RoFormerParallel, hf.RoFormerModel):
    pass


class RoFormerForCausalLM(RoFormerParallel, hf.RoFormerForCausalLM):
    head_plan = LM_HEAD


class RoFormerForMaskedLM(RoFormerParallel, hf.RoFormerForMaskedLM):
    head_plan = LM_HEAD


class RoFormerForSequenceClassification(RoFormerParallel, hf.RoFormerForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class RoFormerForMultipleChoice(RoFormerParallel, hf.RoFormerForMultipleChoice):
    head_plan = {"sequence_summary.summary": Replicated(), "classifier": Replicated()}


class RoFormerForTokenClassification(RoFormerParallel, hf.RoFormerForTokenClassification):
    head_plan = CLASSIFIER


class RoFormerForQuestionAnswering(RoFormerParallel, hf.RoFormerForQuestionAnswering):
    head_plan = QA_OUTPUTS
