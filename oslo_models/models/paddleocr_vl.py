"""PaddleOCR-VL: an encoder of image patches like SigLIP's, a projector, and a decoder like Ernie 4.5."""

from dataclasses import replace
from typing import Any

from transformers import PaddleOCRTextConfig, PaddleOCRVisionConfig, PaddleOCRVLConfig
from transformers.models.paddleocr_vl import modeling_paddleocr_vl as hf
from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVLPreTrainedModel

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.qwen2_vl import QwenWithImagesParallel
from oslo_models.models.siglip import SiglipParallel


class PaddleOCRVisionParallel(SiglipParallel):
    """Sharding plan of the encoder of image patches."""

    encoders = {VISION: ""}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, local = super().plan(config), LocalAttributes({"num_heads": heads_of(config).local_count})
        blocks = {stack: {**block, "self_attn": local} for stack, block in plan.blocks.items()}
        return replace(plan, blocks=blocks).with_rules(single_stage_reason="the patches of all images are one row")


class PaddleOCRVisionTransformer(PaddleOCRVisionParallel, hf.PaddleOCRVisionTransformer):
    head_plan = {"post_layernorm": Norm()}


class PaddleOCRVisionModel(PaddleOCRVisionParallel, hf.PaddleOCRVisionModel):
    encoders = {VISION: f"{VISION}."}
    head_plan = {f"{VISION}.post_layernorm": Norm()}


class PaddleOCRTextModel(LlamaParallel, hf.PaddleOCRTextModel):
    config_class = PaddleOCRTextConfig  # transformers 5.17 has the composite configuration here


class PaddleOCRVLParallel(QwenWithImagesParallel):
    """Sharding plan of the PaddleOCR-VL family."""

    projectors = {"projector": Replicated()}
    classes = {"visual": PaddleOCRVisionModel, "language_model": PaddleOCRTextModel}


class PaddleOCRVLModel(PaddleOCRVLParallel, hf.PaddleOCRVLModel):
    pass


class PaddleOCRVLForConditionalGeneration(PaddleOCRVLParallel, hf.PaddleOCRVLForConditionalGeneration):
    head_plan = LM_HEAD
