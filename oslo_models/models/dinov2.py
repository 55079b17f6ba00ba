"""DINOv2: ViT with scaled residuals; some sizes have gated MLPs."""

from typing import Any

from transformers import Dinov2Config
from transformers.models.dinov2 import modeling_dinov2 as hf

from oslo_models.layers.entries import ColumnParallel, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, heads_of, qkv
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.vit import patch_positions


class Dinov2Parallel(ParallelModel):
    """Sharding plan of the DINOv2 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        mlp = gated_mlp("mlp") if config.use_swiglu_ffn else {"mlp.fc1": ColumnParallel(), "mlp.fc2": RowParallel()}
        block = {
            "norm1": Norm(),
            **qkv("attention", heads),
            "attention.o_proj": RowParallel(heads),
            "layer_scale1": Replicated(),
            "norm2": Norm(),
            **mlp,
            "layer_scale2": Replicated(),
        }
        extra_positions = 1 + getattr(config, "num_register_tokens", 0)
        return Plan(
            embed={"embeddings": Replicated()}, blocks={"encoder.layer": block}, head={"layernorm": Norm()}
        ).with_rules(input_positions={"encoder.layer": patch_positions(config.patch_size, extra_positions)})


class Dinov2Model(Dinov2Parallel, hf.Dinov2Model):
    pass


class Dinov2ForImageClassification(Dinov2Parallel, hf.Dinov2ForImageClassification):
    head_plan = CLASSIFIER
