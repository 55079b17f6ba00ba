"""Muse Glimmer: an encoder with windows of patches, a projector, and Gemma 2's norms around gated attention."""

from typing import Any

from transformers import MuseGlimmerConfig, MuseGlimmerTextConfig, MuseGlimmerVisionConfig
from transformers.models.muse_glimmer import modeling_muse_glimmer as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Replicated
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.kimi_k25 import PatchesParallel
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import GroupedHeads


class MuseGlimmerVisionModel(PatchesParallel, hf.MuseGlimmerVisionModel):
    embed = {"patch_embedder": Replicated(), "ln_pre": Norm()}
    head_plan = {"ln_post": Norm()}


class MuseGlimmerTextModel(LlamaParallel, hf.MuseGlimmerTextModel):
    norms = (*LlamaParallel.norms, "pre_feedforward_layernorm", "post_feedforward_layernorm")

    @classmethod
    def attention(cls, config: Any, heads: GroupedHeads) -> Entries:
        return {**super().attention(config, heads), "self_attn.gate_proj": ColumnParallel(heads.query)}


class MuseGlimmerParallel(LlavaParallel):
    """Sharding plan of the Muse Glimmer family."""

    projectors = dict.fromkeys(("vision_adapter", "vision_projection"), Replicated())
    classes = {"vision_tower": MuseGlimmerVisionModel, "language_model": MuseGlimmerTextModel}


class MuseGlimmerModel(MuseGlimmerParallel, hf.MuseGlimmerModel):
    pass


class MuseGlimmerForConditionalGeneration(MuseGlimmerParallel, hf.MuseGlimmerForConditionalGeneration):
    head_plan = LM_HEAD
