"""MobileNetV2: blocks that expand images to more channels, which ranks divide. Stem and last convolution are whole."""

from collections.abc import Iterable
from typing import Any

from transformers import MobileNetV2Config
from transformers.models.mobilenet_v2 import modeling_mobilenet_v2 as hf

from oslo_models.layers.entries import Entries, LocalChannels, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER, sharded_pair


def inverted_residual(prefix: str = "") -> Entries:
    """Return the plan of a block with a depthwise convolution of expanded channels."""
    return {
        **sharded_pair(f"{prefix}expand_1x1", f"{prefix}reduce_1x1"),
        **{f"{prefix}conv_3x3.{part}": LocalChannels() for part in ("convolution", "normalization")},
    }


def downsampling(stages: Iterable[str]) -> Entries:
    """Return the entries of the blocks that shrink the image before the stages of MobileViT."""
    paths = [f"{stage}.downsampling_layer." for stage in stages]
    return {name: entry for path in paths for name, entry in inverted_residual(path).items()}


class MobileNetV2Parallel(ParallelModel):
    """Sharding plan of the MobileNetV2 family."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed={"conv_stem": Replicated()},
            blocks={"layer": inverted_residual()},
            head={"conv_1x1": Replicated()},
        ).with_rules(single_stage_reason=SMALLER)


class MobileNetV2Model(MobileNetV2Parallel, hf.MobileNetV2Model):
    pass


class MobileNetV2ForImageClassification(MobileNetV2Parallel, hf.MobileNetV2ForImageClassification):
    head_plan = CLASSIFIER


class MobileNetV2ForSemanticSegmentation(MobileNetV2Parallel, hf.MobileNetV2ForSemanticSegmentation):
    head_plan = {"segmentation_head": Replicated()}
