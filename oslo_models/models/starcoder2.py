"""StarCoder2: Llama with layer norms and an MLP that has no gate."""

from transformers.models.starcoder2 import modeling_starcoder2 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel
from oslo_models.plan import Column, Row


class Starcoder2Parallel(LlamaParallel):
    """How every model of the StarCoder2 family divides."""

    mlp = {"mlp.c_fc": Column(), "mlp.c_proj": Row()}


globals().update(family(Starcoder2Parallel, hf, DECODER))
