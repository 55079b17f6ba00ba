"""Gemma: Llama with scaled embeddings."""

from transformers import GemmaConfig
from transformers.models.gemma import modeling_gemma as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class GemmaModel(LlamaParallel, hf.GemmaModel):
    pass


class GemmaForCausalLM(LlamaParallel, hf.GemmaForCausalLM):
    head_plan = LM_HEAD


class GemmaForSequenceClassification(LlamaParallel, hf.GemmaForSequenceClassification):
    head_plan = SCORE


class GemmaForTokenClassification(LlamaParallel, hf.GemmaForTokenClassification):
    head_plan = SCORE
