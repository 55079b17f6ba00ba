"""Qwen3: Llama with norms of each query and key head."""

from transformers.models.qwen3 import modeling_qwen3 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class Qwen3Parallel(LlamaParallel):
    """How every model of the Qwen3 family divides."""

    head_norms = ("self_attn.q_norm", "self_attn.k_norm")


globals().update(family(Qwen3Parallel, hf, DECODER))
