"""Gemma: Llama with scaled embeddings."""

from transformers import GemmaConfig
from transformers.models.gemma import modeling_gemma as hf
from transformers.models.gemma.modeling_gemma import GemmaPreTrainedModel

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class GemmaParallel(LlamaParallel):
    """Sharding plan of the Gemma family."""


class GemmaModel(GemmaParallel, hf.GemmaModel):
    pass


class GemmaForCausalLM(GemmaParallel, hf.GemmaForCausalLM):
    head_plan = LM_HEAD


class GemmaForSequenceClassification(GemmaParallel, hf.GemmaForSequenceClassification):
    head_plan = SCORE


class GemmaForTokenClassification(GemmaParallel, hf.GemmaForTokenClassification):
    head_plan = SCORE
