"""Blenderbot, the small one: BART."""

from transformers.models.blenderbot_small import modeling_blenderbot_small as hf

from oslo_models.models.bart import DECODER, HEADS, BartParallel
from oslo_models.models.family import family


class BlenderbotSmallParallel(BartParallel):
    """How every model of the Blenderbot-small family divides."""


globals().update(family(BlenderbotSmallParallel, hf, HEADS, ForCausalLM=DECODER))
