"""Cohere 2: Cohere of which most blocks attend to a window."""

from transformers.models.cohere2 import modeling_cohere2 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class Cohere2Parallel(LlamaParallel):
    """How every model of the Cohere 2 family divides."""

    norms = ("input_layernorm",)


globals().update(family(Cohere2Parallel, hf, DECODER))
