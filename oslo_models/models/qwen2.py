"""Qwen2: Llama with biases of query, key and value."""

from transformers.models.qwen2 import modeling_qwen2 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class Qwen2Parallel(LlamaParallel):
    """How every model of the Qwen2 family divides."""


globals().update(family(Qwen2Parallel, hf, DECODER))
