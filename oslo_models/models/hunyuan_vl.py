"""HunYuan-VL: an encoder of image patches, and HunYuan with positions of width, height and image."""

from typing import Any

from transformers import HunYuanVLConfig, HunYuanVLTextConfig, HunYuanVLVisionConfig
from transformers.models.hunyuan_vl import modeling_hunyuan_vl as hf

from oslo_models.layers.entries import ColumnParallel, LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.hunyuan_v1_dense import HunYuanDenseV1Parallel
from oslo_models.models.llava import LlavaParallel


class HunYuanEncoderParallel(ParallelModel):
    """Sharding plan of the encoder."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "layer_norm1": Norm(),
            "self_attn": LocalAttributes({"num_heads": heads.local_count}),
            **qkv("self_attn", heads),
            "self_attn.o_proj": RowParallel(heads),
            "layer_norm2": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        return Plan(
            embed={"embeddings": Replicated()}, blocks={"layers": block}, head={"patch_merger": Replicated()}
        ).with_rules(single_stage_reason="the patches of all images are one row")


class HunYuanVLVisionTransformer(HunYuanEncoderParallel, hf.HunYuanVLVisionTransformer):
    pass


class HunYuanVLTextModel(HunYuanDenseV1Parallel, hf.HunYuanVLTextModel):
    @classmethod
    def plan(cls, config: Any) -> Plan:
        return super().plan(config).with_rules(single_stage_reason="positions count the images of all rows of a batch")


class HunYuanVLParallel(LlavaParallel):
    """Sharding plan of the HunYuan-VL family."""

    projectors = {}
    classes = {"vision_tower": HunYuanVLVisionTransformer, "language_model": HunYuanVLTextModel}


class HunYuanVLModel(HunYuanVLParallel, hf.HunYuanVLModel):
    pass


class HunYuanVLForConditionalGeneration(HunYuanVLParallel, hf.HunYuanVLForConditionalGeneration):
    head_plan = LM_HEAD
