"""mBART: BART with norms before attention and MLP."""

from transformers.models.mbart import modeling_mbart as hf

from oslo_models.models.bart import DECODER, HEADS, BartParallel
from oslo_models.models.family import family


class MBartParallel(BartParallel):
    """How every model of the mBART family divides."""

    after = ("layer_norm",)


globals().update(family(MBartParallel, hf, HEADS, ForCausalLM=DECODER))
