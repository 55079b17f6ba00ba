"""Mistral: Llama that attends to a window."""

from transformers.models.mistral import modeling_mistral as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class MistralParallel(LlamaParallel):
    """How every model of the Mistral family divides."""


globals().update(family(MistralParallel, hf, DECODER))
