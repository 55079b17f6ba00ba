"""DINOv3: DINOv2 with rotary positions of patches. In training, it may scale and move these positions at random."""

from typing import Any

from transformers import DINOv3ViTConfig
from transformers.models.dinov3_vit import modeling_dinov3_vit as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, heads_of, qkv
from oslo_models.models.vit import patch_positions

AUGMENTING = ("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale")


class DINOv3ViTParallel(ParallelModel):
    """Sharding plan of the DINOv3 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads, mlp = heads_of(config), dict(gated_mlp("mlp"))
        if not config.use_gated_mlp:
            del mlp["mlp.gate_proj"]
        block = {
            "norm1": Norm(),
            "attention": LocalAttributes({"num_heads": heads.local_count}),
            **qkv("attention", heads),
            "attention.o_proj": RowParallel(heads),
            "layer_scale1": Replicated(),
            "norm2": Norm(),
            **mlp,
            "layer_scale2": Replicated(),
        }
        drawn = [f"{name}={value}" for name in AUGMENTING if (value := getattr(config, name)) is not None]
        positions = patch_positions(config.patch_size, 1 + config.num_register_tokens)
        plan = Plan(embed={"embeddings": Replicated()}, blocks={"model.layer": block}, head={"norm": Norm()})
        return plan.with_rules(
            input_positions={"model.layer": positions},
            single_stage_reason=f"with {drawn[0]}, each stage would draw other positions" if drawn else "",
        )

    def _prefix(self) -> str:
        return ""  # the prefix in transformers' class names the encoder


class DINOv3ViTModel(DINOv3ViTParallel, hf.DINOv3ViTModel):
    pass
