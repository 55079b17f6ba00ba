"""M2M100: mBART with positions of sines that count the padding out."""

from transformers import M2M100Config
from transformers.models.m2m_100 import modeling_m2m_100 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class M2M100Parallel(BartParallel):
    """How every model of the M2M100 family divides."""

    before = ()
    after = ("layer_norm",)


class M2M100Model(M2M100Parallel, hf.M2M100Model):
    pass


class M2M100ForConditionalGeneration(M2M100Parallel, hf.M2M100ForConditionalGeneration):
    head_plan = LM_HEAD
