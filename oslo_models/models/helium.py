"""Helium: Llama with interleaved rotary positions."""

from transformers import HeliumConfig
from transformers.models.helium import modeling_helium as hf

from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class HeliumModel(LlamaParallel, hf.HeliumModel):
    pass


class HeliumForCausalLM(LlamaParallel, hf.HeliumForCausalLM):
    head_plan = LM_HEAD


class HeliumForSequenceClassification(LlamaParallel, hf.HeliumForSequenceClassification):
    head_plan = SCORE


class HeliumForTokenClassification(LlamaParallel, hf.HeliumForTokenClassification):
    head_plan = SCORE
