"""LLaVA-OneVision: LLaVA-NeXT with fewer tokens for large images, and with videos."""

from transformers import LlavaOnevisionConfig
from transformers.models.llava_onevision import modeling_llava_onevision as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava_next import TiledParallel


class LlavaOnevisionModel(TiledParallel, hf.LlavaOnevisionModel):
    pass


class LlavaOnevisionForConditionalGeneration(TiledParallel, hf.LlavaOnevisionForConditionalGeneration):
    head_plan = LM_HEAD
