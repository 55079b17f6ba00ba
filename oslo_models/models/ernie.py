"""ERNIE: BERT with optional embeddings of the kind of task."""

from dataclasses import replace
from typing import Any

from transformers import ErnieConfig
from transformers.models.ernie import modeling_ernie as hf

from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Plan, Replicated


class ErnieParallel(BertParallel):
    """Sharding plan of the ERNIE family."""

    added_embeddings = (*BertParallel.added_embeddings, "task_type")

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(plan, optional=(*plan.optional, "task_type_embeddings"))


class ErnieModel(ErnieParallel, hf.ErnieModel):
    pass


class ErnieForPreTraining(ErnieParallel, hf.ErnieForPreTraining):
    head_plan = {**LM_HEAD, "cls.seq_relationship": Replicated()}


class ErnieForCausalLM(ErnieParallel, hf.ErnieForCausalLM):
    head_plan = LM_HEAD


class ErnieForMaskedLM(ErnieParallel, hf.ErnieForMaskedLM):
    head_plan = LM_HEAD


class ErnieForNextSentencePrediction(ErnieParallel, hf.ErnieForNextSentencePrediction):
    head_plan = {"cls.seq_relationship": Replicated()}


class ErnieForSequenceClassification(ErnieParallel, hf.ErnieForSequenceClassification):
    head_plan = CLASSIFIER


class ErnieForMultipleChoice(ErnieParallel, hf.ErnieForMultipleChoice):
    head_plan = CLASSIFIER


class ErnieForTokenClassification(ErnieParallel, hf.ErnieForTokenClassification):
    head_plan = CLASSIFIER


class ErnieForQuestionAnswering(ErnieParallel, hf.ErnieForQuestionAnswering):
    head_plan = QA_OUTPUTS
