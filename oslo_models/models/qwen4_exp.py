"""Qwen4-Exp: the encoder of Qwen3.5, and the text model."""

from transformers import Qwen4ExpConfig, Qwen4ExpVisionConfig
from transformers.models.qwen4_exp import modeling_qwen4_exp as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen2_vl import QwenWithImagesParallel
from oslo_models.models.qwen3_5 import Qwen3_5EncoderParallel


class Qwen4ExpVisionModel(Qwen3_5EncoderParallel, hf.Qwen4ExpVisionModel):
    pass


class Qwen4ExpModel(QwenWithImagesParallel, hf.Qwen4ExpModel):
    pass


class Qwen4ExpForConditionalGeneration(QwenWithImagesParallel, hf.Qwen4ExpForConditionalGeneration):
    head_plan = LM_HEAD
