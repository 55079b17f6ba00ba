"""GLM-OCR: GLM-4V with query and key norms, and without a table of positions, in the encoder."""

from transformers import GlmOcrConfig, GlmOcrTextConfig, GlmOcrVisionConfig
from transformers.models.glm_ocr import modeling_glm_ocr as hf

from oslo_models.layers.entries import HeadNorm, Norm, Replicated
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.glm4 import Glm4Parallel
from oslo_models.models.qwen2_vl import QwenEncoderParallel, QwenWithImagesParallel


class GlmOcrVisionModel(QwenEncoderParallel, hf.GlmOcrVisionModel):
    mlp = {**gated_mlp("mlp"), "attn.q_norm": HeadNorm(), "attn.k_norm": HeadNorm()}
    mergers = {"merger": Replicated(), "downsample": Replicated(), "post_layernorm": Norm()}


class GlmOcrTextModel(Glm4Parallel, hf.GlmOcrTextModel):
    pass


class GlmOcrModel(QwenWithImagesParallel, hf.GlmOcrModel):
    pass


class GlmOcrForConditionalGeneration(QwenWithImagesParallel, hf.GlmOcrForConditionalGeneration):
    head_plan = LM_HEAD
