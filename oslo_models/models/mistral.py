"""Mistral: Llama with sliding-window attention."""

from transformers import MistralConfig
from transformers.models.mistral import modeling_mistral as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class MistralModel(LlamaParallel, hf.MistralModel):
    pass


class MistralForCausalLM(LlamaParallel, hf.MistralForCausalLM):
    head_plan = LM_HEAD


class MistralForSequenceClassification(LlamaParallel, hf.MistralForSequenceClassification):
    head_plan = SCORE


class MistralForTokenClassification(LlamaParallel, hf.MistralForTokenClassification):
    head_plan = SCORE


class MistralForQuestionAnswering(LlamaParallel, hf.MistralForQuestionAnswering):
    head_plan = QA_OUTPUTS
