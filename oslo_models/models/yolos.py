"""YOLOS: ViT with further tokens that detect objects. Its loss needs scipy."""

from typing import Any

from transformers import YolosConfig
from transformers.models.yolos import modeling_yolos as hf

from oslo_models.layers.entries import Norm, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, nested_attention_block
from oslo_models.models.vit import patch_positions

TOKENS = ("embeddings.cls_token", "embeddings.detection_tokens", "embeddings.position_embeddings")
MIDDLE = "encoder.interpolation.mid_position_embeddings"


class YolosParallel(ParallelModel):
    """Sharding plan of the YOLOS family."""

    zeros = (*TOKENS, MIDDLE, *(f"vit.{name}" for name in (*TOKENS, MIDDLE)))

    @classmethod
    def plan(cls, config: Any) -> Plan:
        positions = {f"encoder.{name}": Replicated() for name in ("interpolation", "mid_position_embeddings")}
        return Plan(
            embed={"embeddings": Replicated(), **positions},
            blocks={"encoder.layer": nested_attention_block(heads_of(config))},
            head={"layernorm": Norm(), "pooler": Replicated()},
            optional=("pooler", *positions),
        ).with_rules(
            input_positions={"encoder.layer": patch_positions(config.patch_size, 1 + config.num_detection_tokens)},
            single_stage_reason="with use_mid_position_embeddings=True, its blocks add positions by their number"
            if config.use_mid_position_embeddings
            else "",
        )


class YolosModel(YolosParallel, hf.YolosModel):
    pass


class YolosForObjectDetection(YolosParallel, hf.YolosForObjectDetection):
    head_plan = {"class_labels_classifier": Replicated(), "bbox_predictor": Replicated()}
