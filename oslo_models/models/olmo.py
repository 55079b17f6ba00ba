"""OLMo: Llama with norms without weights."""

from transformers import OlmoConfig
from transformers.models.olmo import modeling_olmo as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class OlmoModel(LlamaParallel, hf.OlmoModel):
    pass


class OlmoForCausalLM(LlamaParallel, hf.OlmoForCausalLM):
    head_plan = LM_HEAD


class OlmoForSequenceClassification(LlamaParallel, hf.OlmoForSequenceClassification):
    head_plan = SCORE
