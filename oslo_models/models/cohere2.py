"""Cohere 2: Cohere with sliding-window attention in most blocks."""

from transformers import Cohere2Config
from transformers.models.cohere2 import modeling_cohere2 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel


class Cohere2Parallel(LlamaParallel):
    """Sharding plan of the Cohere 2 family."""

    norms = ("input_layernorm",)


class Cohere2Model(Cohere2Parallel, hf.Cohere2Model):
    pass


class Cohere2ForCausalLM(Cohere2Parallel, hf.Cohere2ForCausalLM):
    head_plan = LM_HEAD
