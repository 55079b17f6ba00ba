"""Mistral: Llama with sliding-window attention."""

from transformers import MistralConfig
from transformers.models.mistral import modeling_mistral as hf
from transformers.models.mistral.modeling_mistral import MistralPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, QA_OUTPUTS, SCORE
from oslo_models.models.llama import LlamaParallel


class MistralParallel(LlamaParallel):
    """Sharding plan of the Mistral family."""


class MistralModel(MistralParallel, hf.MistralModel):
    pass


class MistralForCausalLM(MistralParallel, hf.MistralForCausalLM):
    head_plan = LM_HEAD


class MistralForSequenceClassification(MistralParallel, hf.MistralForSequenceClassification):
    head_plan = SCORE


class MistralForTokenClassification(MistralParallel, hf.MistralForTokenClassification):
    head_plan = SCORE


class MistralForQuestionAnswering(MistralParallel, hf.MistralForQuestionAnswering):
    head_plan = QA_OUTPUTS
