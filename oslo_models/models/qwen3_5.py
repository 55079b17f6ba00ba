"""Qwen3.5: the encoder of Qwen3-VL without features of inner blocks, and the text model."""

from transformers import Qwen3_5Config, Qwen3_5VisionConfig
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from oslo_models.layers.entries import Replicated
from oslo_models.modeling.heads import LM_HEAD, SCORE
from oslo_models.models.qwen2_vl import QwenWithImagesParallel
from oslo_models.models.qwen3_vl import Qwen3VLEncoderParallel


class Qwen3_5EncoderParallel(Qwen3VLEncoderParallel):
    """Sharding plan of the encoders of image patches in Qwen3.5."""

    mergers = {"merger": Replicated()}


class Qwen3_5VisionModel(Qwen3_5EncoderParallel, hf.Qwen3_5VisionModel):
    pass


class Qwen3_5Model(QwenWithImagesParallel, hf.Qwen3_5Model):
    pass


class Qwen3_5ForConditionalGeneration(QwenWithImagesParallel, hf.Qwen3_5ForConditionalGeneration):
    head_plan = LM_HEAD


class Qwen3_5ForSequenceClassification(QwenWithImagesParallel, hf.Qwen3_5ForSequenceClassification):
    head_plan = SCORE


class Qwen3_5ForTokenClassification(QwenWithImagesParallel, hf.Qwen3_5ForTokenClassification):
    head_plan = SCORE
