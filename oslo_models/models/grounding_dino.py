"""Grounding DINO: a detector that reads texts by an encoder of this table. Its backbone of images is replicated."""

from collections.abc import Mapping
from typing import Any

from transformers import GroundingDinoConfig
from transformers.models.grounding_dino import modeling_grounding_dino as hf

from oslo_models.auto import AutoModel
from oslo_models.layers.entries import ColumnParallel, Entries, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import QUERY_KEY_VALUE, qkv
from oslo_models.models.deformable_detr import sampling_attention
from oslo_models.sharding.layout import EvenSplit

OF_IMAGES = ("vision_proj", "values_vision_proj", "text_proj", "values_text_proj")
OPTIONAL = (
    *("query_position_embeddings", "reference_points", "enc_output", "enc_output_norm"),
    *("encoder_output_bbox_embed", "encoder_output_class_embed"),
    *("decoder.bbox_embed", "decoder.class_embed"),
)


def _attention(name: str, count: int, width: int) -> Entries:
    """Return the entries of attention over texts or queries. Masks have an entry for each head."""
    heads = EvenSplit(count, width // count)
    local = {"num_attention_heads": heads.local_count, "all_head_size": heads.local_extent}
    return {
        name: LocalAttributes(local, per_head={"attention_mask": heads}),
        **qkv(name, heads, QUERY_KEY_VALUE),
        f"{name}.out_proj": RowParallel(heads),
    }


def _mlp(prefix: str) -> Entries:
    return {f"{prefix}fc1": ColumnParallel(), f"{prefix}fc2": RowParallel()}


class GroundingDinoParallel(ParallelModel):
    """Sharding plan of the Grounding DINO family."""

    @classmethod
    def encoder_block(cls, config: Any) -> Entries:
        """Return the entries of a block of texts, of both, and of images."""
        count, width = config.encoder_attention_heads, config.d_model
        samples, half = config.num_feature_levels * config.encoder_n_points, count // 2
        both = EvenSplit(half, config.encoder_ffn_dim // 2 // half)
        attention = "fusion_layer.attn"
        return {
            **_attention("text_enhancer_layer.self_attn", half, width),
            **_mlp("text_enhancer_layer."),
            **{f"text_enhancer_layer.layer_norm_{place}": Norm() for place in ("before", "after")},
            **{f"fusion_layer.layer_norm_{kind}": Norm() for kind in ("vision", "text")},
            **{f"fusion_layer.{kind}_param": Replicated() for kind in ("vision", "text")},
            attention: LocalAttributes({"num_heads": both.local_count, "embed_dim": both.local_extent}),
            **qkv(attention, both, OF_IMAGES),
            **{f"{attention}.out_{kind}_proj": RowParallel(both) for kind in ("vision", "text")},
            **sampling_attention("deformable_layer.self_attn", EvenSplit(count, width // count), samples),
            **_mlp("deformable_layer."),
            **{f"deformable_layer.{norm}_layer_norm": Norm() for norm in ("self_attn", "final")},
        }

    @classmethod
    def decoder_block(cls, config: Any) -> Entries:
        """Return the entries of a block of queries, which read texts and images."""
        count, width = config.decoder_attention_heads, config.d_model
        samples = config.num_feature_levels * config.decoder_n_points
        return {
            **_attention("self_attn", count, width),
            **_attention("encoder_attn_text", count, width),
            **sampling_attention("encoder_attn", EvenSplit(count, width // count), samples),
            **_mlp(""),
            **{f"{norm}_layer_norm": Norm() for norm in ("self_attn", "encoder_attn_text", "encoder_attn", "final")},
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        text: Plan = AutoModel.class_for(config.text_config).plan(config.text_config)
        images = ("backbone", "input_proj_vision", "text_projection", "level_embed")
        after = ("decoder.layer_norm", "decoder.reference_points_head", *OPTIONAL)
        own = Plan(
            embed=dict.fromkeys(images, Replicated()),
            blocks={"encoder.layers": cls.encoder_block(config), "decoder.layers": cls.decoder_block(config)},
            head=dict.fromkeys(after, Replicated()),
            optional=OPTIONAL,
        )
        return (text.under("text_backbone.") | own).with_rules(single_stage_reason="its blocks read texts and images")

    @classmethod
    def joined_attentions(cls, config: Any) -> Mapping[str, int]:
        return {"encoder_attentions": config.encoder_attention_heads // 2}  # between images and texts


class GroundingDinoModel(GroundingDinoParallel, hf.GroundingDinoModel):
    pass


class GroundingDinoForObjectDetection(GroundingDinoParallel, hf.GroundingDinoForObjectDetection):
    head_plan = {"bbox_embed": Replicated()}
