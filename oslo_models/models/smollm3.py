"""SmolLM3: Llama with some blocks that have no positions."""

from transformers.models.smollm3 import modeling_smollm3 as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class SmolLM3Parallel(LlamaParallel):
    """How every model of the SmolLM3 family divides."""


globals().update(family(SmolLM3Parallel, hf, DECODER))
