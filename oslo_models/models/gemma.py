"""Gemma: Llama with scaled embeddings."""

from transformers.models.gemma import modeling_gemma as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class GemmaParallel(LlamaParallel):
    """How every model of the Gemma family divides."""


globals().update(family(GemmaParallel, hf, DECODER))
