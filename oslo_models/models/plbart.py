"""PLBART: BART for programs."""

from transformers.models.plbart import modeling_plbart as hf

from oslo_models.models.bart import DECODER, HEADS, BartParallel
from oslo_models.models.family import family


class PLBartParallel(BartParallel):
    """How every model of the PLBART family divides."""


globals().update(family(PLBartParallel, hf, HEADS, ForCausalLM=DECODER))
