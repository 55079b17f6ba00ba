"""mBART: BART with pre-layer norms."""

from transformers import MBartConfig
from transformers.models.mbart import modeling_mbart as hf

from oslo_models.modeling.heads import CLASSIFICATION_HEAD, LM_HEAD, QA_OUTPUTS
from oslo_models.models.bart import BartParallel


class MBartParallel(BartParallel):
    """Sharding plan of the mBART family."""

    final_norms = ("layer_norm",)


class MBartModel(MBartParallel, hf.MBartModel):
    pass


class MBartForConditionalGeneration(MBartParallel, hf.MBartForConditionalGeneration):
    head_plan = LM_HEAD


class MBartForCausalLM(MBartParallel, hf.MBartForCausalLM):
    head_plan = LM_HEAD
    stacks = ("decoder",)


class MBartForSequenceClassification(MBartParallel, hf.MBartForSequenceClassification):
    head_plan = CLASSIFICATION_HEAD


class MBartForQuestionAnswering(MBartParallel, hf.MBartForQuestionAnswering):
    head_plan = QA_OUTPUTS
