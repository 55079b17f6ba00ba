"""Hunyuan 4 VL: the encoder of HunYuan-VL, and Hunyuan 4 with positions of time, height and width."""

from transformers import HYV4VLConfig, HYV4VLVisionConfig
from transformers.models.hy_v4_vl import modeling_hy_v4_vl as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.hunyuan_vl import HunYuanEncoderParallel
from oslo_models.models.hy_v4_vl_text import HYV4VLTextModel
from oslo_models.models.llava import LlavaParallel


class HYV4VLVisionModel(HunYuanEncoderParallel, hf.HYV4VLVisionModel):
    pass


class HYV4VLParallel(LlavaParallel):
    """Sharding plan of the Hunyuan 4 VL family."""

    projectors = {}
    classes = {"vision_tower": HYV4VLVisionModel, "language_model": HYV4VLTextModel}


class HYV4VLModel(HYV4VLParallel, hf.HYV4VLModel):
    pass


class HYV4VLForConditionalGeneration(HYV4VLParallel, hf.HYV4VLForConditionalGeneration):
    head_plan = LM_HEAD
