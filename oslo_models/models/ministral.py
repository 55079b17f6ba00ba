"""Ministral: Llama with sliding-window attention in some blocks."""

from transformers import MinistralConfig
from transformers.models.ministral import modeling_ministral as hf
from transformers.models.ministral.modeling_ministral import MinistralPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class MinistralParallel(LlamaParallel):
    """Sharding plan of the Ministral family."""


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
