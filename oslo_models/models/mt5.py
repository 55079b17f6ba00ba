"""mT5: T5 for a hundred languages."""

from transformers.models.mt5 import modeling_mt5 as hf

from oslo_models.models.family import family
from oslo_models.models.t5 import ENCODER, HEADS, T5Parallel


class MT5Parallel(T5Parallel):
    """How every model of the mT5 family divides."""


globals().update(family(MT5Parallel, hf, HEADS, EncoderModel=ENCODER, ForTokenClassification=ENCODER))
