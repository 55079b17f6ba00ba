"""Ministral: Llama of which some blocks attend to a window."""

from transformers import MinistralConfig
from transformers.models.ministral import modeling_ministral as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class MinistralParallel(LlamaParallel):
    """How every model of the Ministral family divides."""


class MinistralModel(MinistralParallel, hf.MinistralModel):
    pass


class MinistralForCausalLM(MinistralParallel, hf.MinistralForCausalLM):
    head_plan = LM_HEAD


class MinistralForSequenceClassification(MinistralParallel, hf.MinistralForSequenceClassification):
    head_plan = SCORE


class MinistralForTokenClassification(MinistralParallel, hf.MinistralForTokenClassification):
    head_plan = SCORE


class MinistralForQuestionAnswering(MinistralParallel, hf.MinistralForQuestionAnswering):
    head_plan = QA_OUTPUTS
