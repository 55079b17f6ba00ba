"""Blenderbot: BART with norms before attention and MLP."""

from transformers.models.blenderbot import modeling_blenderbot as hf

from oslo_models.models.bart import DECODER, HEADS, BartParallel
from oslo_models.models.family import family


class BlenderbotParallel(BartParallel):
    """How every model of the Blenderbot family divides."""

    before = ()
    after = ("layer_norm",)


globals().update(family(BlenderbotParallel, hf, HEADS, ForCausalLM=DECODER))
