"""IDEFICS: an encoder of image patches, and Llama with blocks between its own that attend to images.

Every rank holds the vocabulary, since additional tokens have tables of their own.
"""

from dataclasses import replace
from typing import Any

from transformers import IdeficsConfig
from transformers.models.idefics import modeling_idefics as hf

from oslo_models.layers.entries import Entries, HeadNorm, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, heads_of, qkv
from oslo_models.models.kosmos_2 import KosmosVisionParallel
from oslo_models.sharding.layout import EvenSplit


class IdeficsParallel(ParallelModel):
    """Sharding plan of the IDEFICS family."""

    @staticmethod
    def block(heads: EvenSplit, attention: str) -> Entries:
        """Return the entries of a block with this attention."""
        return {
            attention: LocalAttributes({"num_heads": heads.local_count}),
            **qkv(attention, heads),
            f"{attention}.o_proj": RowParallel(heads),
            **gated_mlp("mlp"),
            **{name: Norm() for name in ("input_layernorm", "post_attention_layernorm")},
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, norms = heads_of(config), {f"cross_attn.{name}_layer_norm": HeadNorm() for name in "qk"}
        gates = {"alpha_cross_attn": Replicated(), "alpha_dense": Replicated()}
        vision, perceiver = KosmosVisionParallel.plan(config.vision_config), {"perceiver_resampler": Replicated()}
        tower = replace(vision, head=KosmosVisionParallel.head_plan).under("vision_model.")
        return Plan(
            embed={"embed_tokens": Replicated()},
            blocks={
                "layers": cls.block(heads, "self_attn"),
                "gated_cross_attn_layers": {**cls.block(heads, "cross_attn"), **norms, **gates},
            },
            head={"norm": Norm()},
            optional=(*norms, *perceiver),
            towers={"vision_model": replace(tower, head={**tower.head, **perceiver})},
        ).with_rules(single_stage_reason="blocks that attend to images are between its blocks")


class IdeficsModel(IdeficsParallel, hf.IdeficsModel):
    pass


class IdeficsForVisionText2Text(IdeficsParallel, hf.IdeficsForVisionText2Text):
    head_plan = {"lm_head": Replicated()}
