"""MarkupLM: BERT with embeddings of the path of each token in an HTML page."""

from dataclasses import replace
from typing import Any

from transformers import MarkupLMConfig
from transformers.models.markuplm import modeling_markuplm as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel


class MarkupLMParallel(BertParallel):
    """Sharding plan of the MarkupLM family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        return replace(plan, embed={**plan.embed, "embeddings.xpath_embeddings": Replicated()})


class MarkupLMModel(MarkupLMParallel, hf.MarkupLMModel):
    pass


class MarkupLMForSequenceClassification(MarkupLMParallel, hf.MarkupLMForSequenceClassification):
    head_plan = CLASSIFIER


class MarkupLMForTokenClassification(MarkupLMParallel, hf.MarkupLMForTokenClassification):
    head_plan = CLASSIFIER


class MarkupLMForQuestionAnswering(MarkupLMParallel, hf.MarkupLMForQuestionAnswering):
    head_plan = QA_OUTPUTS
