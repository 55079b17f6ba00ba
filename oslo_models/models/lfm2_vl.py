"""LFM2-VL: the tower of SigLIP 2, a projector of neighbouring patches, and LFM2."""

from transformers import Lfm2VlConfig
from transformers.models.lfm2_vl import modeling_lfm2_vl as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class Lfm2VlModel(LlavaParallel, hf.Lfm2VlModel):
    pass


class Lfm2VlForConditionalGeneration(LlavaParallel, hf.Lfm2VlForConditionalGeneration):
    head_plan = LM_HEAD
