"""SmolVLM: Idefics3 with fewer positions for each image."""

from transformers import SmolVLMConfig, SmolVLMVisionConfig
from transformers.models.smolvlm import modeling_smolvlm as hf

from oslo_models.layers.entries import Norm
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.idefics3 import Idefics3Parallel
from oslo_models.models.siglip import SiglipParallel


class SmolVLMVisionTransformer(SiglipParallel, hf.SmolVLMVisionTransformer):
    head_plan = {"post_layernorm": Norm()}
    encoders = {VISION: ""}


class SmolVLMModel(Idefics3Parallel, hf.SmolVLMModel):
    pass


class SmolVLMForConditionalGeneration(Idefics3Parallel, hf.SmolVLMForConditionalGeneration):
    head_plan = LM_HEAD
