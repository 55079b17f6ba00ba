"""ResNet: convolutions, two of each block sharded by channels. Bottlenecks and shortcuts have whole ones, too."""

from typing import Any, ClassVar

from transformers import ResNetConfig
from transformers.models.resnet import modeling_resnet as hf

from oslo_models.layers.entries import ColumnParallel, Entries, Plan, Replicated, RowParallel
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.heads import CLASSIFIER

SMALLER = "images become smaller between its blocks"
"""Why networks of convolutions have no pipeline stages."""


def sharded_pair(first: str, last: str) -> Entries:
    """Return the entries of two convolutions with a sharded activation between them, each with its batch norm."""
    return {
        f"{first}.convolution": ColumnParallel(channels=True),
        f"{first}.normalization": ColumnParallel(channels=True),
        f"{last}.convolution": RowParallel(channels=True),
        f"{last}.normalization": Replicated(),
    }


class ResNetParallel(ParallelModel):
    """Sharding plan of the ResNet family.

    Attributes:
        stem: name of the first convolution.
    """

    stem: ClassVar[str] = "embedder"

    @classmethod
    def block(cls, config: Any) -> Entries:
        """Return the plan of a block."""
        if config.layer_type == "basic":
            return sharded_pair("layer.0", "layer.1")
        return {"layer.0": Replicated(), **sharded_pair("layer.1", "layer.2")}

    @classmethod
    def plan(cls, config: Any) -> Plan:
        stages = [f"encoder.stages.{stage}.layers" for stage in range(len(config.depths))]
        block = {"shortcut": Replicated(), **cls.block(config)}
        return Plan(
            embed={cls.stem: Replicated()}, blocks=dict.fromkeys(stages, block), head={}, optional=("shortcut",)
        ).with_rules(single_stage_reason=SMALLER)


class ResNetModel(ResNetParallel, hf.ResNetModel):
    pass


class ResNetForImageClassification(ResNetParallel, hf.ResNetForImageClassification):
    head_plan = CLASSIFIER
