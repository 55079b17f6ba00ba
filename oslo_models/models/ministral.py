"""Ministral: Llama of which some blocks attend to a window."""

from transformers.models.ministral import modeling_ministral as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class MinistralParallel(LlamaParallel):
    """How every model of the Ministral family divides."""


globals().update(family(MinistralParallel, hf, DECODER))
