"""LightOnOCR: the tower of Pixtral, a projector and Qwen3."""

from transformers import LightOnOcrConfig
from transformers.models.lighton_ocr import modeling_lighton_ocr as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class LightOnOcrParallel(LlavaParallel):
    """Sharding plan of the LightOnOCR family."""

    towers = {"vision_encoder": "vision_config"}
    projectors = {"vision_projection": Replicated()}


class LightOnOcrModel(LightOnOcrParallel, hf.LightOnOcrModel):
    pass


class LightOnOcrForConditionalGeneration(LightOnOcrParallel, hf.LightOnOcrForConditionalGeneration):
    head_plan = LM_HEAD
