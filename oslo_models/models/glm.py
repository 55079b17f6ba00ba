"""GLM: Llama with gate and up in one matrix."""

from transformers.models.glm import modeling_glm as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Row


class GlmParallel(LlamaParallel):
    """How every model of the GLM family divides."""

    mlp = {"mlp.gate_up_proj": Column(parts=2), "mlp.down_proj": Row()}


globals().update(family(GlmParallel, hf, DECODER))
