"""MobileViT: convolutions of expanded channels, and transformers over patches. Convolutions around them are whole."""

from collections.abc import Iterable
from typing import Any

from transformers import MobileViTConfig
from transformers.models.mobilevit import modeling_mobilevit as hf

from oslo_models.layers.entries import (
    ColumnParallel,
    Entries,
    LocalAttributes,
    Norm,
    Plan,
    Replicated,
    RowParallel,
)
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER, sharded_pair
from oslo_models.sharding.layout import EvenSplit

AROUND = ("conv_kxk", "conv_1x1", "conv_projection", "fusion")


def inverted_residual(prefix: str = "") -> Entries:
    """Return the plan of a block with a depthwise convolution of expanded channels."""
    return {
        **sharded_pair(f"{prefix}expand_1x1", f"{prefix}reduce_1x1"),
        **{f"{prefix}conv_3x3.{part}": ColumnParallel(channels=True) for part in ("convolution", "normalization")},
    }


def downsampling(stages: Iterable[str]) -> Entries:
    """Return the entries of the blocks that shrink the image before a stage."""
    paths = [f"{stage}.downsampling_layer." for stage in stages]
    return {name: entry for path in paths for name, entry in inverted_residual(path).items()}


class MobileViTParallel(ParallelModel):
    """Sharding plan of the MobileViT family."""

    @staticmethod
    def block(heads: EvenSplit) -> Entries:
        """Return the plan of a transformer block."""
        attention = "attention.attention"
        return {
            "layernorm_before": Norm(),
            attention: LocalAttributes({"all_head_size": heads.local_extent}),
            **{f"{attention}.{part}": ColumnParallel(heads) for part in ("query", "key", "value")},
            "attention.output.dense": RowParallel(heads),
            "layernorm_after": Norm(),
            "intermediate.dense": ColumnParallel(),
            "output.dense": RowParallel(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        heads = config.num_attention_heads
        transformers = {f"encoder.layer.{stage}": width for stage, width in enumerate(config.hidden_sizes, 2)}
        return Plan(
            embed={
                "conv_stem": Replicated(),
                **{f"{stage}.{part}": Replicated() for stage in transformers for part in AROUND},
                **downsampling(transformers),
            },
            blocks={
                **{f"encoder.layer.{stage}.layer": inverted_residual() for stage in range(2)},
                **{
                    f"{stage}.transformer.layer": cls.block(EvenSplit(heads, width // heads))
                    for stage, width in transformers.items()
                },
            },
            head={**{f"{stage}.layernorm": Norm() for stage in transformers}, "conv_1x1_exp": Replicated()},
            optional=("conv_1x1_exp",),
        ).with_rules(single_stage_reason=SMALLER)


class MobileViTModel(MobileViTParallel, hf.MobileViTModel):
    pass


class MobileViTForImageClassification(MobileViTParallel, hf.MobileViTForImageClassification):
    head_plan = CLASSIFIER


class MobileViTForSemanticSegmentation(MobileViTParallel, hf.MobileViTForSemanticSegmentation):
    head_plan = {"segmentation_head": Replicated()}
