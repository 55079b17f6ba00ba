"""Qwen2.5-VL: Qwen2-VL with gated MLPs in the encoder, and attention to windows in most of its blocks."""

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as hf

from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen2_vl import QwenEncoderParallel, QwenWithImagesParallel


class Qwen2_5_VisionTransformerPretrainedModel(QwenEncoderParallel, hf.Qwen2_5_VisionTransformerPretrainedModel):
    mlp = gated_mlp("mlp")


class Qwen2_5_VLParallel(QwenWithImagesParallel):
    """Sharding plan of the Qwen2.5-VL family."""

    classes = {"visual": Qwen2_5_VisionTransformerPretrainedModel}


class Qwen2_5_VLTextModel(LlamaParallel, hf.Qwen2_5_VLTextModel):
    pass


class Qwen2_5_VLModel(Qwen2_5_VLParallel, hf.Qwen2_5_VLModel):
    pass


class Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLParallel, hf.Qwen2_5_VLForConditionalGeneration):
    head_plan = LM_HEAD
