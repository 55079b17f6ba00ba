"""TAPAS: BERT that also embeds where in a table a word is."""

from dataclasses import replace
from typing import Any

from transformers import TapasConfig
from transformers.models.tapas import modeling_tapas as hf

from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Plan, Replicated


class TapasParallel(BertParallel):
    """How every model of the TAPAS family divides."""

    tables = ("position",)
    one_stage = ""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        types = {f"embeddings.token_type_embeddings_{i}": Replicated() for i in range(len(config.type_vocab_sizes))}
        optional = (*plan.optional, "aggregation_classifier")
        return replace(plan, embed={**plan.embed, **types}, optional=optional, one_stage=cls.one_stage)


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
    one_stage = "its loss is no mean over labels, which micro-batches could share"
