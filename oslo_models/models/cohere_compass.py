"""Cohere Compass: the encoder of Qwen3-VL, and the text model. Its first blocks add features of encoder blocks."""

from transformers import CohereCompassConfig, CohereCompassVisionConfig
from transformers.models.cohere_compass import modeling_cohere_compass as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_vl import Qwen3VLEncoderParallel, Qwen3VLParallel


class CohereCompassVisionModel(Qwen3VLEncoderParallel, hf.CohereCompassVisionModel):
    pass


class CohereCompassModel(Qwen3VLParallel, hf.CohereCompassModel):
    pass


class CohereCompassForConditionalGeneration(Qwen3VLParallel, hf.CohereCompassForConditionalGeneration):
    head_plan = LM_HEAD
