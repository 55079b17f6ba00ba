"""Helium: Llama with interleaved rotary positions."""

from transformers.models.helium import modeling_helium as hf

from oslo_models.models.family import DECODER, family
from oslo_models.models.llama import LlamaParallel


class HeliumParallel(LlamaParallel):
    """How every model of the Helium family divides."""


globals().update(family(HeliumParallel, hf, DECODER))
