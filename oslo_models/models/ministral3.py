"""Ministral 3: Mistral with queries that are scaled by their positions."""

from transformers import Ministral3Config
from transformers.models.ministral3 import modeling_ministral3 as hf

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class Ministral3Model(LlamaParallel, hf.Ministral3Model):
    pass


class Ministral3ForCausalLM(LlamaParallel, hf.Ministral3ForCausalLM):
    head_plan = LM_HEAD


class Ministral3ForSequenceClassification(LlamaParallel, hf.Ministral3ForSequenceClassification):
    head_plan = SCORE


class Ministral3ForTokenClassification(LlamaParallel, hf.Ministral3ForTokenClassification):
    head_plan = SCORE


class Ministral3ForQuestionAnswering(LlamaParallel, hf.Ministral3ForQuestionAnswering):
    head_plan = QA_OUTPUTS
