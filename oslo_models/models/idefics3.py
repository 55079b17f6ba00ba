"""Idefics3: an encoder of image patches, a connector and Llama."""

from transformers import Idefics3Config, Idefics3VisionConfig
from transformers.models.idefics3 import modeling_idefics3 as hf

from oslo_models.layers.entries import Norm, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.siglip import SiglipParallel


class Idefics3Parallel(LlavaParallel):
    """Sharding plan of the Idefics3 family."""

    decoder_name = "text_model"
    towers = {"vision_model": "vision_config"}
    projectors = {"connector": Replicated()}


class Idefics3VisionTransformer(SiglipParallel, hf.Idefics3VisionTransformer):
    head_plan = {"post_layernorm": Norm()}
    encoders = {VISION: ""}


class Idefics3Model(Idefics3Parallel, hf.Idefics3Model):
    pass


class Idefics3ForConditionalGeneration(Idefics3Parallel, hf.Idefics3ForConditionalGeneration):
    head_plan = LM_HEAD
