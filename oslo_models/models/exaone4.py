"""EXAONE 4: norms after attention and MLP, and of each query and key head."""

from transformers.models.exaone4 import modeling_exaone4 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class Exaone4Parallel(LlamaParallel):
    """How every model of the EXAONE 4 family divides."""

    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    head_norms = ("self_attn.q_norm", "self_attn.k_norm")


globals().update(family(Exaone4Parallel, hf, DECODER))
