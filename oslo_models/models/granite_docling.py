"""Granite Docling: SigLIP's encoder, a connector and Granite. Its first blocks add features of encoder blocks."""

from dataclasses import replace
from typing import Any

from transformers import GraniteDoclingConfig, GraniteDoclingTextConfig, GraniteDoclingVisionConfig
from transformers.models.granite_docling import modeling_granite_docling as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.granite import GraniteParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.siglip import SiglipParallel


class GraniteDoclingVisionModel(SiglipParallel, hf.GraniteDoclingVisionModel):
    head_plan = {"post_layernorm": Norm(), "connector": Replicated()}
    encoders = {VISION: ""}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="it returns the outputs of several blocks")


class GraniteDoclingTextModel(GraniteParallel, hf.GraniteDoclingTextModel):
    pass


class GraniteDoclingParallel(LlavaParallel):
    """Sharding plan of the Granite Docling family."""

    decoder_name = "text_model"
    towers = {"vision_model": "vision_config"}
    projectors = {"density_router": Replicated()}
    classes = {"vision_model": GraniteDoclingVisionModel, "text_model": GraniteDoclingTextModel}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        # Features of the encoder are added after these blocks, and are not part of the hidden states that they return.
        plan, count = super().plan(config), len(config.vision_config.deepstack_visual_indexes)
        optional = () if config.density_router_hidden_size else ("density_router",)
        return replace(plan, optional=(*plan.optional, *optional)).with_rules(
            continued_blocks={"text_model.layers": range(1, count + 1)}
        )


class GraniteDoclingModel(GraniteDoclingParallel, hf.GraniteDoclingModel):
    pass


class GraniteDoclingForConditionalGeneration(GraniteDoclingParallel, hf.GraniteDoclingForConditionalGeneration):
    head_plan = LM_HEAD
