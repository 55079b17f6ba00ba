"""Kimi K2.5: an encoder of image patches, a projector and DeepSeek-V3."""

from typing import Any

from transformers import Kimi_K25Config, Kimi_K25VisionConfig
from transformers.models.kimi_k25 import modeling_kimi_k25 as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel


class Kimi_K25VisionModel(ParallelModel, hf.Kimi_K25VisionModel):
    head_plan = {"final_layernorm": Norm()}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "norm1": Norm(),
            **qkv("attn", heads),
            "attn.proj": RowParallel(heads),
            "norm2": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
        }
        return Plan(embed={"patch_embed": Replicated()}, blocks={"layers": block}, head={}).with_rules(
            single_stage_reason="the patches of all images are one row"
        )


class Kimi_K25Parallel(LlavaParallel):
    """Sharding plan of the Kimi K2.5 family."""

    projectors = {"mm_projector": Replicated()}
    classes = {"vision_tower": Kimi_K25VisionModel}


class Kimi_K25Model(Kimi_K25Parallel, hf.Kimi_K25Model):
    pass


class Kimi_K25ForConditionalGeneration(Kimi_K25Parallel, hf.Kimi_K25ForConditionalGeneration):
    head_plan = LM_HEAD
