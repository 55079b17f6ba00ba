"""Qwen3.5 MoE: Qwen3.5 with images and a mixture of experts in the decoder."""

from transformers import Qwen3_5MoeConfig, Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen2_vl import QwenWithImagesParallel
from oslo_models.models.qwen3_5 import Qwen3_5EncoderParallel


class Qwen3_5MoeVisionModel(Qwen3_5EncoderParallel, hf.Qwen3_5MoeVisionModel):
    pass


class Qwen3_5MoeModel(QwenWithImagesParallel, hf.Qwen3_5MoeModel):
    pass


class Qwen3_5MoeForConditionalGeneration(QwenWithImagesParallel, hf.Qwen3_5MoeForConditionalGeneration):
    head_plan = LM_HEAD
