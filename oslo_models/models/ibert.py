"""I-BERT: RoBERTa that learns the ranges of its activations, to compute in integers; with `quant_mode`, on one rank."""

from dataclasses import replace
from typing import Any

from transformers import IBertConfig
from transformers.models.ibert import modeling_ibert as hf

from oslo_models.modeling.heads import CLASSIFIER, DENSE_CLASSIFIER, QA_OUTPUTS
from oslo_models.models.bert import BertParallel
from oslo_models.models.roberta import LM_HEAD
from oslo_models.sharding.plan import GlobalMinMax, Plan

RANGES = (
    *(f"attention.self.{name}_activation" for name in ("query", "key", "value", "output")),
    *("intermediate.output_activation", "pre_output_act"),
)


class IBertParallel(BertParallel):
    """How every model of the I-BERT family divides."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        (block,) = plan.blocks.values()
        reason = "with quant_mode=True it rounds down what it computes, and sums of parts are not exactly those of all"
        return replace(
            plan,
            blocks={"encoder.layer": {**block, **{name: GlobalMinMax() for name in RANGES}}},
            one_stage="its layers hand on the scale of their integers too, and stages exchange hidden states only",
            one_rank=reason if config.quant_mode else "",
        )


class IBertModel(IBertParallel, hf.IBertModel):
    pass


class IBertForMaskedLM(IBertParallel, hf.IBertForMaskedLM):
    head_plan = LM_HEAD


class IBertForSequenceClassification(IBertParallel, hf.IBertForSequenceClassification):
    head_plan = DENSE_CLASSIFIER


class IBertForMultipleChoice(IBertParallel, hf.IBertForMultipleChoice):
    head_plan = CLASSIFIER


class IBertForTokenClassification(IBertParallel, hf.IBertForTokenClassification):
    head_plan = CLASSIFIER


class IBertForQuestionAnswering(IBertParallel, hf.IBertForQuestionAnswering):
    head_plan = QA_OUTPUTS
