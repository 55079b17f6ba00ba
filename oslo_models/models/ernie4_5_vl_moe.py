"""ERNIE 4.5 VL: ERNIE 4.5 MoE with separate experts for tokens of text and of images, and an encoder of patches."""

from transformers import Ernie4_5_VLMoeConfig, Ernie4_5_VLMoeTextConfig, Ernie4_5_VLMoeVisionConfig
from transformers.models.ernie4_5_vl_moe import modeling_ernie4_5_vl_moe as hf

from oslo_models.layers.entries import Norm, Replicated
from oslo_models.modeling.blocks import gated_mlp, mixture_of_experts
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.qwen2_vl import QwenEncoderParallel


class Ernie4_5_VLMoeEncoderParallel(QwenEncoderParallel):
    """Sharding plan of the encoder of image patches."""

    mergers = {"ln": Norm()}


class Ernie4_5_VLMoeTextModel(LlamaParallel, hf.Ernie4_5_VLMoeTextModel):
    mlp = {
        **LlamaParallel.mlp,
        **mixture_of_experts("mlp.text_moe"),
        **mixture_of_experts("mlp.vision_moe"),
        **gated_mlp("mlp.shared_experts"),
    }
    optional = tuple(mlp)


class Ernie4_5_VLMoeParallel(LlavaParallel):
    """Sharding plan of the ERNIE 4.5 VL family."""

    projectors = {"resampler_model": Replicated()}
    classes = {
        "language_model": Ernie4_5_VLMoeTextModel,
        "vision_tower": Ernie4_5_VLMoeEncoderParallel,
    }


class Ernie4_5_VLMoeModel(Ernie4_5_VLMoeParallel, hf.Ernie4_5_VLMoeModel):
    pass


class Ernie4_5_VLMoeForConditionalGeneration(Ernie4_5_VLMoeParallel, hf.Ernie4_5_VLMoeForConditionalGeneration):
    head_plan = LM_HEAD
