"""MiniCPM-OCR: MiniCPM-V 4.6 for documents."""

from transformers import MiniCPMOcrConfig, MiniCPMOcrVisionConfig
from transformers.models.minicpm_ocr import modeling_minicpm_ocr as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.minicpmv4_6 import MiniCPMV4_6Parallel


class MiniCPMOcrModel(MiniCPMV4_6Parallel, hf.MiniCPMOcrModel):
    pass


class MiniCPMOcrForConditionalGeneration(MiniCPMV4_6Parallel, hf.MiniCPMOcrForConditionalGeneration):
    head_plan = LM_HEAD
