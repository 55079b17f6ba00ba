"""Qianfan-OCR: the encoder of InternVL, a projector and Qwen3."""

from transformers import QianfanOCRConfig, QianfanOCRVisionConfig
from transformers.models.qianfan_ocr import modeling_qianfan_ocr as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.internvl import InternVLEncoderParallel
from oslo_models.models.llava import LlavaParallel


class QianfanOCRVisionModel(InternVLEncoderParallel, hf.QianfanOCRVisionModel):
    stack = "layers"


class QianfanOCRModel(LlavaParallel, hf.QianfanOCRModel):
    pass


class QianfanOCRForConditionalGeneration(LlavaParallel, hf.QianfanOCRForConditionalGeneration):
    head_plan = LM_HEAD
