"""Phi-3.5 MoE: Mixtral with layer norms and a router that samples its experts while training."""

from transformers import PhimoeConfig
from transformers.models.phimoe import modeling_phimoe as hf

from oslo_models.modeling.blocks import mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.llama import LlamaParallel


class PhimoeParallel(LlamaParallel):
    """Sharding plan of the Phi-3.5 MoE family."""

    mlp = mixture_of_experts(router="router")


class PhimoeModel(PhimoeParallel, hf.PhimoeModel):
    pass


class PhimoeForCausalLM(PhimoeParallel, hf.PhimoeForCausalLM):
    head_plan = LM_HEAD


class PhimoeForSequenceClassification(PhimoeParallel, hf.PhimoeForSequenceClassification):
    head_plan = SCORE
