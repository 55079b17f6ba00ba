"""Qwen2: Llama with biases of query, key and value."""

from transformers import Qwen2Config
from transformers.models.qwen2 import modeling_qwen2 as hf
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class Qwen2Parallel(LlamaParallel):
    """Sharding plan of the Qwen2 family."""


class Qwen2Model(Qwen2Parallel, hf.Qwen2Model):
    pass


class Qwen2ForCausalLM(Qwen2Parallel, hf.Qwen2ForCausalLM):
    head_plan = LM_HEAD


class Qwen2ForSequenceClassification(Qwen2Parallel, hf.Qwen2ForSequenceClassification):
    head_plan = SCORE


class Qwen2ForTokenClassification(Qwen2Parallel, hf.Qwen2ForTokenClassification):
    head_plan = SCORE


class Qwen2ForQuestionAnswering(Qwen2Parallel, hf.Qwen2ForQuestionAnswering):
    head_plan = QA_OUTPUTS
