"""DETR: encoder-decoder over a convolutional backbone, replicated on every rank. Its loss needs scipy."""

from typing import Any

from transformers import DetrConfig
from transformers.models.detr import modeling_detr as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import qkv
from oslo_models.sharding.layout import EvenSplit


class DetrParallel(ParallelModel):
    """Sharding plan of the DETR family."""

    @staticmethod
    def block(heads: EvenSplit, *attentions: str) -> Entries:
        """Return the plan entries of a block with these attention layers."""
        block: dict[str, Replicated] = {
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            "final_layer_norm": Norm(),
        }
        for name in attentions:
            block |= qkv(name, heads)
            block |= {f"{name}.o_proj": RowParallel(heads), f"{name}_layer_norm": Norm()}
        return block

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder = (
            EvenSplit(count, config.d_model // count)
            for count in (config.encoder_attention_heads, config.decoder_attention_heads)
        )
        images = ("backbone", "input_projection", "position_embedding", "query_position_embeddings")
        return Plan(
            embed={name: Replicated() for name in images},
            blocks={
                "encoder.layers": cls.block(encoder, "self_attn"),
                "decoder.layers": cls.block(decoder, "self_attn", "encoder_attn"),
            },
            head={"decoder.layernorm": Norm()},
        ).with_rules(single_stage_reason="its backbone also computes the mask that all blocks need")


class DetrModel(DetrParallel, hf.DetrModel):
    pass


class DetrForObjectDetection(DetrParallel, hf.DetrForObjectDetection):
    head_plan = {"class_labels_classifier": Replicated(), "bbox_predictor": Replicated()}


class DetrForSegmentation(DetrParallel, hf.DetrForSegmentation):
    head_plan = {
        "detr.class_labels_classifier": Replicated(),
        "detr.bbox_predictor": Replicated(),
        "mask_head": Replicated(),
        "bbox_attention": Replicated(),
    }

    def _prefix(self) -> str:
        return "detr.model."  # inside the detection model
