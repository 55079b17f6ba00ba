"""Conditional DETR: DETR with separate projections of positions. Its backbone is replicated. Its loss needs scipy."""

from typing import Any

from transformers import ConditionalDetrConfig
from transformers.models.conditional_detr import modeling_conditional_detr as hf

from oslo_models.layers.entries import Entries, LocalAttributes, Replicated, RowParallel
from oslo_models.modeling.blocks import qkv
from oslo_models.models.detr import CLASSES_AND_BOXES, DetrParallel

PROJECTIONS = ("q_content_proj", "q_pos_proj", "k_content_proj", "k_pos_proj", "v_proj")


class ConditionalDetrParallel(DetrParallel):
    """Sharding plan of the Conditional DETR family."""

    after = {**DetrParallel.after, "decoder.query_scale": Replicated(), "decoder.ref_point_head": Replicated()}
    optional = ("encoder_attn.q_pos_proj",)  # of the first block

    @classmethod
    def attention(cls, config: Any, stack: str, name: str) -> Entries:
        if stack == "encoder":
            return super().attention(config, stack, name)
        heads, further = cls.heads(config, stack), ("q_pos_sine_proj",) if name == "encoder_attn" else ()
        local = LocalAttributes({"num_attention_heads": heads.local_count})
        return {name: local, **qkv(name, heads, (*PROJECTIONS, *further)), f"{name}.o_proj": RowParallel(heads)}


class ConditionalDetrModel(ConditionalDetrParallel, hf.ConditionalDetrModel):
    pass


class ConditionalDetrForObjectDetection(ConditionalDetrParallel, hf.ConditionalDetrForObjectDetection):
    head_plan = CLASSES_AND_BOXES


class ConditionalDetrForSegmentation(ConditionalDetrParallel, hf.ConditionalDetrForSegmentation):
    head_plan = {
        **{f"conditional_detr.{name}": entry for name, entry in CLASSES_AND_BOXES.items()},
        "mask_head": Replicated(),
        "bbox_attention": Replicated(),
    }

    def _prefix(self) -> str:
        return "conditional_detr.model."  # inside the detection model
