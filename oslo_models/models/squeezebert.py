"""SqueezeBERT: BERT with grouped convolutions in place of linear layers; its blocks are replicated on every rank."""

from dataclasses import replace
from typing import Any

from transformers import SqueezeBertConfig
from transformers.models.squeezebert import modeling_squeezebert as hf

from oslo_models.modeling.heads import QA_OUTPUTS
from oslo_models.models.bert import LM_HEAD, BertParallel
from oslo_models.sharding.plan import Entries, Norm, Plan, Replicated

CLASSIFIER: Entries = {"classifier": Replicated()}
LAYERS = ("attention.query", "attention.key", "attention.value")


class SqueezeBertParallel(BertParallel):
    """Sharding plan of the SqueezeBERT family: only its vocabulary is sharded.

    Each group of a convolution reads a slice of the previous layer's output, and heads extend across the groups.
    """

    @classmethod
    def plan(cls, config: Any) -> Plan:
        convolutions = (*LAYERS, "post_attention.conv1d", "intermediate.conv1d", "output.conv1d")
        block: Entries = {
            **{name: Replicated() for name in convolutions},
            "post_attention.layernorm": Norm(),
            "output.layernorm": Norm(),
        }
        return replace(super().plan(config), blocks={"encoder.layers": block})


class SqueezeBertModel(SqueezeBertParallel, hf.SqueezeBertModel):
    pass


class SqueezeBertForMaskedLM(SqueezeBertParallel, hf.SqueezeBertForMaskedLM):
    head_plan = LM_HEAD


class SqueezeBertForSequenceClassification(SqueezeBertParallel, hf.SqueezeBertForSequenceClassification):
    head_plan = CLASSIFIER


class SqueezeBertForMultipleChoice(SqueezeBertParallel, hf.SqueezeBertForMultipleChoice):
    head_plan = CLASSIFIER


class SqueezeBertForTokenClassification(SqueezeBertParallel, hf.SqueezeBertForTokenClassification):
    head_plan = CLASSIFIER


class SqueezeBertForQuestionAnswering(SqueezeBertParallel, hf.SqueezeBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
