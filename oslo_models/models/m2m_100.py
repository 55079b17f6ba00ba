"""M2M100: mBART with positions of sines that count the padding out."""

from transformers.models.m2m_100 import modeling_m2m_100 as hf

from oslo_models.models.bart import HEADS, BartParallel
from oslo_models.models.family import family


class M2M100Parallel(BartParallel):
    """How every model of the M2M100 family divides."""

    before = ()
    after = ("layer_norm",)


globals().update(family(M2M100Parallel, hf, HEADS))
