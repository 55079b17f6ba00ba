"""TAPAS: BERT with embeddings of the position of each token in a table."""

from dataclasses import replace
from typing import Any

from transformers import TapasConfig
from transformers.models.tapas import modeling_tapas as hf

from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Plan, Replicated


class TapasParallel(BertParallel):
    """Sharding plan of the TAPAS family."""

    added_embeddings = ("position",)
    reason = ""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        types = {f"embeddings.token_type_embeddings_{i}": Replicated() for i in range(len(config.type_vocab_sizes))}
        optional = (*plan.optional, "aggregation_classifier")
        return replace(plan, embed={**plan.embed, **types}, optional=optional).with_rules(
            single_stage_reason=cls.reason
        )


class TapasModel(TapasParallel, hf.TapasModel):
    pass


class TapasForMaskedLM(TapasParallel, hf.TapasForMaskedLM):
    head_plan = LM_HEAD


class TapasForSequenceClassification(TapasParallel, hf.TapasForSequenceClassification):
    head_plan = CLASSIFIER


class TapasForQuestionAnswering(TapasParallel, hf.TapasForQuestionAnswering):
    head_plan = {
        "output_weights": Replicated(),
        "output_bias": Replicated(),
        "column_output_weights": Replicated(),
        "column_output_bias": Replicated(),
        "aggregation_classifier": Replicated(),
    }
    reason = "its loss is not a mean over labels, and cannot be split into micro-batches"
