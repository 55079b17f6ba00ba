"""DETR: encoder and decoder over a convolutional backbone, which is whole on every rank. Its loss needs scipy."""

from typing import Any

from transformers.models.detr import modeling_detr as hf

from oslo_models.layout import Units
from oslo_models.models.base import ParallelModel
from oslo_models.models.family import family
from oslo_models.plan import Column, Entries, Norm, Plan, Replicated, Row

OBJECTS = ("class_labels_classifier", "bbox_predictor")
HEADS: dict[str, Entries] = {
    "Model": {},
    "ForObjectDetection": {name: Replicated() for name in OBJECTS},
    "ForSegmentation": {
        **{f"detr.{name}": Replicated() for name in OBJECTS},
        **{name: Replicated() for name in ("mask_head", "bbox_attention")},
    },
}
SEGMENTATION = {"_prefix": lambda model: "detr.model."}  # around the model that detects


class DetrParallel(ParallelModel):
    """How every model of the DETR family divides."""

    @staticmethod
    def block(heads: Units, *attentions: str) -> Entries:
        """The layers of a block with these attentions."""
        block = {"mlp.fc1": Column(), "mlp.fc2": Row(), "final_layer_norm": Norm()}
        for name in attentions:
            block |= {f"{name}.{side}_proj": Column(heads) for side in "qkv"}
            block |= {f"{name}.o_proj": Row(heads), f"{name}_layer_norm": Norm()}
        return block

    @classmethod
    def plan(cls, config: Any) -> Plan:
        encoder, decoder = (
            Units(count, config.d_model // count)
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
            one_stage="its backbone also makes the mask that all blocks need",
        )


globals().update(family(DetrParallel, hf, HEADS, ForSegmentation=SEGMENTATION))
