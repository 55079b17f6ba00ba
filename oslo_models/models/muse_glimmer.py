"""Muse Glimmer: an encoder with windows of patches, a projector, and Gemma 2's norms around gated attention."""

from typing import Any

from transformers import MuseGlimmerConfig, MuseGlimmerTextConfig, MuseGlimmerVisionConfig
from transformers.models.muse_glimmer import modeling_muse_glimmer as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llama import LlamaParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import GroupedHeads


class MuseGlimmerVisionModel(ParallelModel, hf.MuseGlimmerVisionModel):
    head_plan = {"ln_post": Norm()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "norm1": Norm(),
            **qkv("attn", heads),
            "attn.proj": RowParallel(heads),
            "norm2": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        return Plan(
            embed={"patch_embedder": Replicated(), "ln_pre": Norm()}, blocks={"layers": block}, head={}
        ).with_rules(single_stage_reason="the patches of all images are one row")


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
