"""Qwen3-VL MoE: Qwen3-VL with a mixture of experts in the decoder."""

from transformers import Qwen3VLMoeConfig, Qwen3VLMoeTextConfig, Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe import modeling_qwen3_vl_moe as hf

from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.qwen3_moe import Qwen3MoeParallel
from oslo_models.models.qwen3_vl import Qwen3VLEncoderParallel, Qwen3VLParallel


class Qwen3VLMoeVisionModel(Qwen3VLEncoderParallel, hf.Qwen3VLMoeVisionModel):
    pass


class Qwen3VLMoeTextModel(Qwen3MoeParallel, hf.Qwen3VLMoeTextModel):
    pass


class Qwen3VLMoeModel(Qwen3VLParallel, hf.Qwen3VLMoeModel):
    pass


class Qwen3VLMoeForConditionalGeneration(Qwen3VLParallel, hf.Qwen3VLMoeForConditionalGeneration):
    head_plan = LM_HEAD
