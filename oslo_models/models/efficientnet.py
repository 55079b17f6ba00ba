"""EfficientNet: convolutions of expanded channels, with a gate per channel. The first and last ones are whole."""

from math import ceil
from typing import Any

from transformers import EfficientNetConfig
from transformers.models.efficientnet import modeling_efficientnet as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER


class EfficientNetParallel(ParallelModel):
    """Sharding plan of the EfficientNet family."""

    @staticmethod
    def block() -> Entries:
        """Return the plan of a block with expanded channels."""
        return {
            "expansion.expand_conv": ColumnParallel(channels=True),
            "expansion.expand_bn": ColumnParallel(channels=True),
            "depthwise_conv.depthwise_conv": ColumnParallel(channels=True),
            "depthwise_conv.depthwise_norm": ColumnParallel(channels=True),
            "squeeze_excite.reduce": RowParallel(channels=True),
            "squeeze_excite.expand": ColumnParallel(channels=True),
            "projection.project_conv": RowParallel(channels=True),
            "projection.project_bn": Replicated(),
        }

    @classmethod
    def plan(cls, config: Any) -> Plan:
        parts = ("depthwise_conv", "squeeze_excite", "projection")
        expands = [
            ratio != 1
            for ratio, count in zip(config.expand_ratios, config.num_block_repeats, strict=False)
            for _ in range(ceil(config.depth_coefficient * count))
        ]
        whole = dict.fromkeys(parts, Replicated())  # the channels of the image itself
        return Plan(
            embed={"embeddings": Replicated()},
            blocks={"encoder.blocks": {}},
            head={"encoder.top_conv": Replicated(), "encoder.top_bn": Replicated()},
            block_overrides={"encoder.blocks": [cls.block() if each else whole for each in expands]},
        ).with_rules(single_stage_reason=SMALLER)


class EfficientNetModel(EfficientNetParallel, hf.EfficientNetModel):
    pass


class EfficientNetForImageClassification(EfficientNetParallel, hf.EfficientNetForImageClassification):
    head_plan = CLASSIFIER
