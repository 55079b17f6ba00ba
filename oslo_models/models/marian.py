"""Marian: BART with positions of sines."""

from transformers.models.marian import modeling_marian as hf

from oslo_models.models.bart import DECODER, HEADS, BartParallel
from oslo_models.models.family import family


class MarianParallel(BartParallel):
    """How every model of the Marian family divides."""

    before = ()
    neutral = {"dropout": 0.0, "embed_scale": 1.0}


globals().update(family(MarianParallel, hf, HEADS, ForCausalLM=DECODER))
