"""mT5: T5 for a hundred languages."""

from transformers import MT5Config
from transformers.models.mt5 import modeling_mt5 as hf

from oslo_models.modeling.heads import CLASSIFICATION_HEAD, CLASSIFIER, LM_HEAD, QA_OUTPUTS
from oslo_models.models.t5 import T5Parallel


class MT5Model(T5Parallel, hf.MT5Model):
    pass


class MT5ForConditionalGeneration(T5Parallel, hf.MT5ForConditionalGeneration):
    head_plan = LM_HEAD


class MT5EncoderModel(T5Parallel, hf.MT5EncoderModel):
    stacks = ("encoder",)


class MT5ForSequenceClassification(T5Parallel, hf.MT5ForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class MT5ForTokenClassification(T5Parallel, hf.MT5ForTokenClassification):
    head_plan = CLASSIFIER
    stacks = ("encoder",)


class MT5ForQuestionAnswering(T5Parallel, hf.MT5ForQuestionAnswering):
    head_plan = QA_OUTPUTS
