"""Ministral: Llama with sliding-window attention in some blocks."""

from transformers import MinistralConfig
from transformers.models.ministral import modeling_ministral as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class MinistralModel(LlamaParallel, hf.MinistralModel):
    pass


class MinistralForCausalLM(LlamaParallel, hf.MinistralForCausalLM):
    head_plan = LM_HEAD


class MinistralForSequenceClassification(LlamaParallel, hf.MinistralForSequenceClassification):
    head_plan = SCORE


class MinistralForTokenClassification(LlamaParallel, hf.MinistralForTokenClassification):
    head_plan = SCORE


class MinistralForQuestionAnswering(LlamaParallel, hf.MinistralForQuestionAnswering):
    head_plan = QA_OUTPUTS
