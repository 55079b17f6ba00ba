"""RemBERT: BERT with embeddings of another width before and after the blocks."""

from dataclasses import replace
from typing import Any

from transformers import RemBertConfig
from transformers.models.rembert import modeling_rembert as hf

from oslo_models.layers.entries import Entries, Norm, Plan, Replicated, VocabParallel
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel

LM_HEAD: Entries = {
    "cls.predictions.dense": Replicated(),
    "cls.predictions.LayerNorm": Norm(),
    "cls.predictions.decoder": VocabParallel(),
}


class RemBertParallel(BertParallel):
    """Sharding plan of the RemBERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(plan, embed={**plan.embed, "encoder.embedding_hidden_mapping_in": Replicated()})


class RemBertModel(RemBertParallel, hf.RemBertModel):
    pass


class RemBertForCausalLM(RemBertParallel, hf.RemBertForCausalLM):
    head_plan = LM_HEAD


class RemBertForMaskedLM(RemBertParallel, hf.RemBertForMaskedLM):
    head_plan = LM_HEAD


class RemBertForSequenceClassification(RemBertParallel, hf.RemBertForSequenceClassification):
    head_plan = CLASSIFIER


class RemBertForMultipleChoice(RemBertParallel, hf.RemBertForMultipleChoice):
    head_plan = CLASSIFIER


class RemBertForTokenClassification(RemBertParallel, hf.RemBertForTokenClassification):
    head_plan = CLASSIFIER


class RemBertForQuestionAnswering(RemBertParallel, hf.RemBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
