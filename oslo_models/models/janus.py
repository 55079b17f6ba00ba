"""Janus: an encoder of images, an aligner and Llama. The decoder of generated images is replicated on every rank."""

from dataclasses import replace
from typing import Any

from transformers import JanusConfig, JanusVisionConfig
from transformers.models.janus import modeling_janus as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.blocks import heads_of
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.clip import VISION
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.siglip import SiglipParallel


class JanusVisionModel(SiglipParallel, hf.JanusVisionModel):
    head_plan = {"post_layernorm": Norm()}
    encoders = {VISION: ""}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        plan, heads = super().plan(config), heads_of(config)
        ((stack, block),) = plan.blocks.items()
        attention = {
            "self_attn": LocalAttributes({"num_heads": heads.local_count, "embed_dim": heads.local_extent}),
            "self_attn.projection_layer": RowParallel(heads),
        }
        own = {name: entry for name, entry in block.items() if name != "self_attn.out_proj"}
        return replace(plan, blocks={stack: {**own, **attention}})


class JanusParallel(LlavaParallel):
    """Sharding plan of the Janus family."""

    towers = {"vision_model": "vision_config"}
    projectors = dict.fromkeys(
        ("aligner", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head"), Replicated()
    )
    classes = {"vision_model": JanusVisionModel}


class JanusModel(JanusParallel, hf.JanusModel):
    pass


class JanusForConditionalGeneration(JanusParallel, hf.JanusForConditionalGeneration):
    head_plan = LM_HEAD
