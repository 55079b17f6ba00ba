"""MobileNetV1: pointwise convolutions, sharded by channels, and depthwise ones. These and the stem are whole."""

from typing import Any

from transformers import MobileNetV1Config
from transformers.models.mobilenet_v1 import modeling_mobilenet_v1 as hf

from oslo_models.layers.entries import Entries, GatheredChannels, Plan, Replicated
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER

LAYERS = 26
"""Number of convolutions, which no option changes."""


class MobileNetV1Parallel(ParallelModel):
    """Sharding plan of the MobileNetV1 family. Hidden states, which the model returns, are between its convolutions."""

    @classmethod
    def plan(cls, config: Any) -> Plan:
        depthwise: Entries = {"convolution": Replicated()}
        pointwise: Entries = {"convolution": GatheredChannels()}
        return Plan(
            embed={"conv_stem": Replicated()},
            blocks={"layer": {"normalization": Replicated()}},
            head={},
            block_overrides={"layer": [pointwise if index % 2 else depthwise for index in range(LAYERS)]},
        ).with_rules(single_stage_reason=SMALLER)


class MobileNetV1Model(MobileNetV1Parallel, hf.MobileNetV1Model):
    pass


class MobileNetV1ForImageClassification(MobileNetV1Parallel, hf.MobileNetV1ForImageClassification):
    head_plan = CLASSIFIER
