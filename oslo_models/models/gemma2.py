"""Gemma 2: four norms in a block, caps on attention scores and logits, every other block local."""

from transformers.models.gemma2 import modeling_gemma2 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class Gemma2Parallel(LlamaParallel):
    """How every model of the Gemma 2 family divides."""

    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    )


globals().update(family(Gemma2Parallel, hf, DECODER))
