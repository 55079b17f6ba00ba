"""SwiftFormer: convolutions, and attention of linear cost, replicated on every rank, between sharded MLPs."""

from __future__ import annotations

from typing import Any

from transformers import SwiftFormerConfig
from transformers.models.swiftformer import modeling_swiftformer as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.models.resnet import SMALLER


class SwiftFormerParallel(ParallelModel):
    """Sharding plan of the SwiftFormer family."""

    @staticmethod
    def convolutions(prefix: str = "") -> Entries:
        """Return the plan of a depthwise convolution and an MLP."""
        whole = ("depth_wise_conv", "norm", "layer_scale")
        return {
            **{f"{prefix}{name}": Replicated() for name in whole},
            f"{prefix}point_wise_conv1": ColumnParallel(channels=True),
            f"{prefix}point_wise_conv2": RowParallel(channels=True),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        scales = ("layer_scale_1", "layer_scale_2")
        last: Entries = {
            **cls.convolutions("local_representation."),
            "attn": Replicated(),
            "attn.w_g": Replicated(),
            **{
                "linear.norm1": Replicated(),
                "linear.fc1": ColumnParallel(channels=True),
                "linear.fc2": RowParallel(channels=True),
            },
            **dict.fromkeys(scales, Replicated()),
        }
        embed: dict[str, Replicated] = {"patch_embed": Replicated()}
        blocks, index = {}, 0
        for stage, depth in enumerate(config.depths):
            blocks[f"encoder.network.{index}.blocks"] = [*[cls.convolutions()] * (depth - 1), last]
            index += 1
            widths = config.embed_dims[stage : stage + 2]
            if stage < len(config.depths) - 1 and (config.downsamples[stage] or widths[0] != widths[-1]):
                embed[f"encoder.network.{index}"] = Replicated()
                index += 1
        return Plan(
            embed=embed, blocks={name: {} for name in blocks}, head={}, block_overrides=blocks, optional=scales
        ).with_rules(single_stage_reason=SMALLER)


class SwiftFormerModel(SwiftFormerParallel, hf.SwiftFormerModel):
    pass


class SwiftFormerForImageClassification(SwiftFormerParallel, hf.SwiftFormerForImageClassification):
    head_plan = {"norm": Replicated(), "head": Replicated(), "dist_head": Replicated()}
