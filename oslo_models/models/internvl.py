"""InternVL: an encoder of image patches with scaled residuals, a projector and a decoder of another model."""

from typing import Any, ClassVar

from transformers import InternVLConfig, InternVLVisionConfig
from transformers.models.internvl import modeling_internvl as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
    WidthNorm,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import heads_of, qkv
from oslo_models.modeling.heads import LM_HEAD
from oslo_models.models.llava import LlavaParallel
from oslo_models.models.vit import patch_positions


class InternVLEncoderParallel(ParallelModel):
    """Sharding plan of encoders of image patches with scaled residuals.

    Attributes:
        stack: the blocks.
    """

    stack: ClassVar[str] = "encoder.layer"

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block: dict[str, Replicated] = {
            "layernorm_before": Norm(),
            "attention": LocalAttributes({"num_heads": heads.local_count, "embed_dim": heads.local_extent}),
            **qkv("attention", heads),
            "attention.projection_layer": RowParallel(heads),
            "lambda_1": Replicated(),
            "layernorm_after": Norm(),
            "mlp.fc1": ColumnParallel(),
            "mlp.fc2": RowParallel(),
            "lambda_2": Replicated(),
        }
        if config.use_qk_norm:
            block |= {"attention.q_norm": WidthNorm(heads), "attention.k_norm": WidthNorm(heads)}
        return Plan(
            embed={"embeddings": Replicated()},
            blocks={cls.stack: block},
            head={"layernorm": Norm()},
            optional=("layernorm",),
        ).with_rules(input_positions={cls.stack: patch_positions(config.patch_size, extra_positions=1)})


class InternVLVisionModel(InternVLEncoderParallel, hf.InternVLVisionModel):
    pass


class InternVLModel(LlavaParallel, hf.InternVLModel):
    pass


class InternVLForConditionalGeneration(LlavaParallel, hf.InternVLForConditionalGeneration):
    head_plan = LM_HEAD
