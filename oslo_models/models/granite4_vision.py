"""Granite 4 Vision: a tower, Q-Formers, replicated on every rank, and Granite. Some blocks add their outputs."""

from typing import Any

from transformers import Granite4VisionConfig, Granite4VisionTextConfig
from transformers.models.granite4_vision import modeling_granite4_vision as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel


class Granite4VisionTextModel(LlamaParallel, hf.Granite4VisionTextModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        return (
            super().plan(config).with_rules(single_stage_reason="some blocks, by their number, add features of images")
        )


class Granite4VisionParallel(LlavaParallel):
    """Sharding plan of the Granite 4 Vision family."""

    projectors = dict.fromkeys(("image_newline", "layerwise_projectors", "spatial_projectors"), Replicated())
    classes = {"language_model": Granite4VisionTextModel}


class Granite4VisionModel(Granite4VisionParallel, hf.Granite4VisionModel):
    pass


class Granite4VisionForConditionalGeneration(Granite4VisionParallel, hf.Granite4VisionForConditionalGeneration):
    head_plan = LM_HEAD
