"""Pixtral's encoder of images: gated MLPs, RMS norms, rotary positions in two dimensions."""

from typing import Any

from transformers import PixtralVisionConfig
from transformers.models.pixtral import modeling_pixtral as hf

from oslo_models.layers.entries import LocalAttributes, Norm, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.blocks import gated_mlp, heads_of, qkv


class PixtralParallel(ParallelModel):
    """Sharding plan of the Pixtral family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = heads_of(config)
        block = {
            "attention_norm": Norm(),
            "attention": LocalAttributes({"num_heads": heads.local_count}),
            **qkv("attention", heads),
            "attention.o_proj": RowParallel(heads),
            "ffn_norm": Norm(),
            **gated_mlp("feed_forward"),
        }
        embed = {"patch_conv": Replicated(), "ln_pre": Norm()}
        return Plan(embed=embed, blocks={"transformer.layers": block}, head={}).with_rules(
            single_stage_reason="the patches of all images are one row"
        )


class PixtralVisionModel(PixtralParallel, hf.PixtralVisionModel):
    pass
