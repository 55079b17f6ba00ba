"""Gemma 4 without towers: projectors of pixels and sounds, replicated on every rank, and the text model."""

from dataclasses import replace
from typing import Any

from transformers import Gemma4UnifiedConfig
from transformers.models.gemma4_unified import modeling_gemma4_unified as hf

from oslo_models.layers.entries import Plan, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class Gemma4UnifiedWithImagesParallel(LlavaParallel):
    """Sharding plan of the Gemma 4 family with images and without towers."""

    towers = {}
    projectors = {"embed_vision": Replicated(), "embed_audio": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan = super().plan(config)
        absent = [name for name in ("vision", "audio") if getattr(config, f"{name}_config") is None]
        return replace(plan, optional=(*plan.optional, *(f"embed_{name}" for name in absent)))


class Gemma4UnifiedModel(Gemma4UnifiedWithImagesParallel, hf.Gemma4UnifiedModel):
    pass


class Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedWithImagesParallel, hf.Gemma4UnifiedForConditionalGeneration):
    head_plan = LM_HEAD
