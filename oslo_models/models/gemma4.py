"""Gemma 4 with images: an encoder with poolings, a projector and the text model. An encoder of sounds is replicated."""

from dataclasses import replace
from typing import Any

from transformers import Gemma4Config, Gemma4VisionConfig
from transformers.models.gemma4 import modeling_gemma4 as hf

from oslo_models.auto import AutoModel
from oslo_models.layers.entries import ColumnParallel, HeadNorm, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.gemma2 import Gemma2Parallel
from oslo_models.models.llava import LlavaParallel
from oslo_models.sharding.layout import GroupedHeads


class Gemma4VisionModel(ParallelModel, hf.Gemma4VisionModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = GroupedHeads(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
        linear = {
            "self_attn.q_proj": ColumnParallel(heads.query),
            "self_attn.k_proj": ColumnParallel(heads.key_value),
            "self_attn.v_proj": ColumnParallel(heads.key_value),
            "self_attn.o_proj": RowParallel(heads.query),
            **gated_mlp("mlp"),
        }
        block = {
            **{name: Norm() for name in Gemma2Parallel.norms},
            "self_attn": LocalAttributes({"num_key_value_groups": heads.local_ratio}),
            "self_attn.q_norm": HeadNorm(),
            "self_attn.k_norm": HeadNorm(),
            **{f"{name}.linear": entry for name, entry in linear.items()},
        }
        return Plan(embed={"patch_embedder": Replicated()}, blocks={"encoder.layers": block}, head={}).with_rules(
            single_stage_reason="the pooled patches of all images are one row"
        )


class Gemma4WithImagesParallel(LlavaParallel):
    """Sharding plan of the Gemma 4 family with images."""

    projectors = {"embed_vision": Replicated(), "embed_audio": Replicated(), "audio_tower": Replicated()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        if config.vision_config is not None:
            plan = super().plan(config)
        elif config.audio_config is not None:
            raise ValueError("audio_config without vision_config: sounds without images are not supported")
        else:
            plan = AutoModel.class_for(config.text_config).plan(config.text_config).under("language_model.")
        reason = ""
        if width := config.text_config.hidden_size_per_layer_input:
            reason = f"with hidden_size_per_layer_input={width}, it reads a row of the embedding's weight"
        optional = () if config.audio_config else ("embed_audio", "audio_tower")
        return replace(
            plan, optional=(*plan.optional, *optional), single_rank_reason=plan.single_rank_reason or reason
        ).with_rules(
            single_stage_reason=plan.pipeline.single_stage_reason
            or ("with audio_config, the encoder of sounds is on one stage" if config.audio_config else "")
        )


class Gemma4Model(Gemma4WithImagesParallel, hf.Gemma4Model):
    pass


class Gemma4ForConditionalGeneration(Gemma4WithImagesParallel, hf.Gemma4ForConditionalGeneration):
    head_plan = LM_HEAD
