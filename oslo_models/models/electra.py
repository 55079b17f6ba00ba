"""ELECTRA: BERT with factorised embeddings."""

from dataclasses import replace
from typing import Any

from transformers import ElectraConfig
from transformers.models.electra import modeling_electra as hf

from oslo_models.layers.entries import Entries, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel

LM_HEAD: Entries = {
    "generator_predictions.LayerNorm": Norm(),
    "generator_predictions.dense": Replicated(),
    "generator_lm_head": VocabParallel(),
}


class ElectraParallel(BertParallel):
    """Sharding plan of the ELECTRA family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        optional = (*plan.optional, "embeddings_project")
        return replace(plan, embed={**plan.embed, "embeddings_project": Replicated()}, head={}, optional=optional)


class ElectraModel(ElectraParallel, hf.ElectraModel):
    pass


class ElectraForCausalLM(ElectraParallel, hf.ElectraForCausalLM):
    head_plan = LM_HEAD


class ElectraForMaskedLM(ElectraParallel, hf.ElectraForMaskedLM):
    head_plan = LM_HEAD


class ElectraForSequenceClassification(ElectraParallel, hf.ElectraForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class ElectraForMultipleChoice(ElectraParallel, hf.ElectraForMultipleChoice):
    head_plan = {"sequence_summary.summary": Replicated(), "classifier": Replicated()}


class ElectraForTokenClassification(ElectraParallel, hf.ElectraForTokenClassification):
    head_plan = CLASSIFIER


class ElectraForQuestionAnswering(ElectraParallel, hf.ElectraForQuestionAnswering):
    head_plan = QA_OUTPUTS


class ElectraForPreTraining(ElectraParallel, hf.ElectraForPreTraining):
    head_plan = {
        "discriminator_predictions.dense": Replicated(),
        "discriminator_predictions.dense_prediction": Replicated(),
    }
