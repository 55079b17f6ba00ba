"""Qwen2: Llama with biases of query, key and value."""

from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2 as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class Qwen2Model(LlamaParallel, hf.Qwen2Model):
    pass


class Qwen2ForCausalLM(LlamaParallel, hf.Qwen2ForCausalLM):
    head_plan = LM_HEAD


class Qwen2ForSequenceClassification(LlamaParallel, hf.Qwen2ForSequenceClassification):
    head_plan = SCORE


class Qwen2ForTokenClassification(LlamaParallel, hf.Qwen2ForTokenClassification):
    head_plan = SCORE


class Qwen2ForQuestionAnswering(LlamaParallel, hf.Qwen2ForQuestionAnswering):
    head_plan = QA_OUTPUTS
