"""GLM-4: Llama with norms before and after attention and MLP, gate and up in one matrix."""

from transformers.models.glm4 import modeling_glm4 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Row


class Glm4Parallel(LlamaParallel):
    """How every model of the GLM-4 family divides."""

    norms = ("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
    mlp = {"mlp.gate_up_proj": Column(parts=2), "mlp.down_proj": Row()}


globals().update(family(Glm4Parallel, hf, DECODER))
