"""M2M100: mBART with sinusoidal positions that skip padding."""

from transformers import M2M100Config
from transformers.models.m2m_100 import modeling_m2m_100 as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.bart import BartParallel


class M2M100Parallel(BartParallel):
    """Sharding plan of the M2M100 family."""

    embedding_norms = ()
    final_norms = ("layer_norm",)


class M2M100Model(M2M100Parallel, hf.M2M100Model):
    pass


class M2M100ForConditionalGeneration(M2M100Parallel, hf.M2M100ForConditionalGeneration):
    head_plan = LM_HEAD
