"""MiniCPM-OCR: MiniCPM-V 4.6 for documents."""

from transformers import MiniCPMOcrConfig, MiniCPMOcrVisionConfig
from transformers.models.minicpm_ocr import modeling_minicpm_ocr as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.minicpmv4_6 import MiniCPMEncoderParallel, MiniCPMV4_6Parallel


class MiniCPMOcrVisionModel(MiniCPMEncoderParallel, hf.MiniCPMOcrVisionModel):
    pass


class MiniCPMOcrParallel(MiniCPMV4_6Parallel):
    """Sharding plan of the MiniCPM-OCR family."""

    classes = {"vision_tower": MiniCPMOcrVisionModel}


class MiniCPMOcrModel(MiniCPMOcrParallel, hf.MiniCPMOcrModel):
    pass


class MiniCPMOcrForConditionalGeneration(MiniCPMOcrParallel, hf.MiniCPMOcrForConditionalGeneration):
    head_plan = LM_HEAD
