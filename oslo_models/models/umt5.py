"""UMT5: mT5 with relative position biases in every block."""

from dataclasses import replace
from typing import Any

from transformers import UMT5Config
from transformers.models.umt5 import modeling_umt5 as hf

from oslo_models.modeling.heads import CLASSIFICATION_HEAD, CLASSIFIER, LM_HEAD, QA_OUTPUTS
from oslo_models.models.t5 import T5Parallel
from oslo_models.sharding.plan import Plan


class UMT5Parallel(T5Parallel):
    """Sharding plan of the UMT5 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(copied_from_first_block=())


class UMT5Model(UMT5Parallel, hf.UMT5Model):
    pass


class UMT5ForConditionalGeneration(UMT5Parallel, hf.UMT5ForConditionalGeneration):
    head_plan = LM_HEAD


class UMT5EncoderModel(UMT5Parallel, hf.UMT5EncoderModel):
    stacks = ("encoder",)


class UMT5ForSequenceClassification(UMT5Parallel, hf.UMT5ForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class UMT5ForTokenClassification(UMT5Parallel, hf.UMT5ForTokenClassification):
    head_plan = CLASSIFIER
    stacks = ("encoder",)


class UMT5ForQuestionAnswering(UMT5Parallel, hf.UMT5ForQuestionAnswering):
    head_plan = QA_OUTPUTS
