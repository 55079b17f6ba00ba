"""RoCBERT: BERT with embeddings of shapes and pronunciations, which are replicated."""

from dataclasses import replace
from typing import Any

from transformers import RoCBertConfig
from transformers.models.roc_bert import modeling_roc_bert as hf

from oslo_models.modeling.heads import CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Plan, Replicated


class RoCBertParallel(BertParallel):
    """Sharding plan of the RoCBERT family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        added = ("pronunciation_embed", "shape_embed", "map_inputs_layer")
        tables = {f"embeddings.{name}": Replicated() for name in added}
        return replace(
            plan,
            embed={**plan.embed, **tables},
            optional=(*plan.optional, "map_inputs_layer"),
        ).with_rules(
            disabled_after_first_stage={"embeddings.enable_pronunciation": False, "embeddings.enable_shape": False}
        )


class RoCBertModel(RoCBertParallel, hf.RoCBertModel):
    pass


class RoCBertForMaskedLM(RoCBertParallel, hf.RoCBertForMaskedLM):
    head_plan = LM_HEAD


class RoCBertForCausalLM(RoCBertParallel, hf.RoCBertForCausalLM):
    head_plan = LM_HEAD


class RoCBertForSequenceClassification(RoCBertParallel, hf.RoCBertForSequenceClassification):
    head_plan = CLASSIFIER


class RoCBertForMultipleChoice(RoCBertParallel, hf.RoCBertForMultipleChoice):
    head_plan = CLASSIFIER


class RoCBertForTokenClassification(RoCBertParallel, hf.RoCBertForTokenClassification):
    head_plan = CLASSIFIER


class RoCBertForQuestionAnswering(RoCBertParallel, hf.RoCBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
