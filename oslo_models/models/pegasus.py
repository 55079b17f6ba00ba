"""Pegasus: BART with norms before attention and MLP, and positions of sines."""

from transformers.models.pegasus import modeling_pegasus as hf

from oslo_models.models.bart import DECODER, HEADS, BartParallel
from oslo_models.models.family import family


class PegasusParallel(BartParallel):
    """How every model of the Pegasus family divides."""

    before = ()
    after = ("layer_norm",)
    neutral = {"dropout": 0.0, "embed_scale": 1.0}


globals().update(family(PegasusParallel, hf, HEADS, ForCausalLM=DECODER))
