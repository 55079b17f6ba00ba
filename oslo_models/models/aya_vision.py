"""Aya Vision: the tower of SigLIP, a projector and Cohere2."""

from transformers import AyaVisionConfig
from transformers.models.aya_vision import modeling_aya_vision as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class AyaVisionModel(LlavaParallel, hf.AyaVisionModel):
    pass


class AyaVisionForConditionalGeneration(LlavaParallel, hf.AyaVisionForConditionalGeneration):
    head_plan = LM_HEAD
