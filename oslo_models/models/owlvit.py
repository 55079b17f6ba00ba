"""OWL-ViT: CLIP that detects objects by texts. Its heads of boxes and classes are replicated on every rank."""

from dataclasses import replace
from typing import Any

from transformers import OwlViTConfig, OwlViTTextConfig, OwlViTVisionConfig
from transformers.models.owlvit import modeling_owlvit as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.models.clip import TEXT, VISION, CLIPParallel

POST_NORM = {f"{VISION}.post_layernorm": Norm()}
PROJECTIONS = ("visual_projection", "text_projection", "logit_scale")
HEADS = {"class_head": Replicated(), "box_head": Replicated(), "layer_norm": Norm()}


class OwlViTParallel(CLIPParallel):
    """Sharding plan of the OWL-ViT family."""

    image_embed = {"embeddings": Replicated(), "pre_layernorm": Norm()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        if len(cls.encoders) == 1:
            return plan
        pair = {**POST_NORM, **dict.fromkeys(PROJECTIONS, Replicated())}
        return replace(plan, head={**plan.head, **pair}).with_rules(single_stage_reason="an image has several texts")


class OwlViTTextParallel(OwlViTParallel):
    """Sharding plan of the text encoder."""

    encoders = {TEXT: f"{TEXT}."}


class OwlViTVisionParallel(OwlViTParallel):
    """Sharding plan of the image encoder."""

    encoders = {VISION: f"{VISION}."}
    head_plan = POST_NORM


class OwlViTModel(OwlViTParallel, hf.OwlViTModel):
    loss_is_mean = False


class OwlViTTextModel(OwlViTTextParallel, hf.OwlViTTextModel):
    pass


class OwlViTVisionModel(OwlViTVisionParallel, hf.OwlViTVisionModel):
    pass


class OwlViTForObjectDetection(OwlViTParallel, hf.OwlViTForObjectDetection):
    head_plan = HEADS
