"""TAPAS: BERT that also embeds where in a table a word is."""

from dataclasses import replace
from typing import Any

from transformers.models.tapas import modeling_tapas as hf

from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.models.family import family
from oslo_models.plan import Entries, Plan, Replicated

WEIGHTS = ("output_weights", "output_bias", "column_output_weights", "column_output_bias", "aggregation_classifier")
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForMaskedLM": LM_HEAD,
    "ForSequenceClassification": {"classifier": Replicated()},
    "ForQuestionAnswering": {name: Replicated() for name in WEIGHTS},
}


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


WHY = "its loss is no mean over labels, which micro-batches could share"
globals().update(family(TapasParallel, hf, HEADS, ForQuestionAnswering={"one_stage": WHY}))
