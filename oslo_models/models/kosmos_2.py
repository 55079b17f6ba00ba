"""Kosmos-2: the encoder of CLIP, latent queries that pool its patches, and a decoder with norms inside its layers."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from transformers import Kosmos2Config
from transformers.models.kosmos2 import modeling_kosmos2 as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel, WidthNorm
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.models.clip import VISION, CLIPParallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import EvenSplit


class KosmosVisionParallel(CLIPParallel):
    """Sharding plan of encoders with the blocks of CLIP, whose outputs are normed outside of them."""

    head_plan = {"post_layernorm": Norm()}
    encoders = {VISION: ""}


class KosmosTextParallel(ParallelModel):
    """Sharding plan of the decoders of Kosmos-2 and Kosmos-2.5.

    Attributes:
        tables: the embeddings before the blocks.
        reason: see `PipelineRules.single_stage_reason`.
    """

    tables: ClassVar[Entries] = {"embed_tokens": Replicated()}  # it generates by itself
    reason: ClassVar[str] = "a part of it generates by itself"

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            **qkv("self_attn", heads),
            "self_attn.inner_attn_ln": WidthNorm(heads),
            "self_attn.out_proj": RowParallel(heads),
            "self_attn_layer_norm": Norm(),
            "ffn.fc1": ColumnParallel(),
            "ffn.ffn_layernorm": WidthNorm(EvenSplit(config.ffn_dim)),
            "ffn.fc2": RowParallel(),
            "final_layer_norm": Norm(),
        }
        return Plan(
            embed=cls.tables,
            blocks={"layers": block},
            head={"layer_norm": Norm()},
            optional=("inner_attn_ln",),
        ).with_rules(single_stage_reason=cls.reason)


class Kosmos2Parallel(LlavaParallel):
    """Sharding plan of the Kosmos-2 family."""

    decoder_name = "text_model.model"
    towers = {"vision_model.model": "vision_config"}
    projectors = {"image_to_text_projection": Replicated()}
    classes = {"text_model.model": KosmosTextParallel, "vision_model.model": KosmosVisionParallel}

    @classmethod
    def replicated_attentions(cls, config: Any) -> Collection[str]:
        return ("projection_attentions",)


class Kosmos2Model(Kosmos2Parallel, hf.Kosmos2Model):
    pass


class Kosmos2ForConditionalGeneration(Kosmos2Parallel, hf.Kosmos2ForConditionalGeneration):
    head_plan = {"text_model.lm_head": Replicated()}
