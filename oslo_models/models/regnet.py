"""RegNet: ResNet with grouped convolutions, and perhaps a gate per channel. Shortcuts are not divided."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn
from transformers import RegNetConfig
from transformers import initialization as init
from transformers.models.regnet import modeling_regnet as hf

from oslo_models.layers.entries import ColumnChannels, Entries, LocalChannels, Plan, Replicated, RowChannels
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.resnet import SMALLER, ResNetParallel
from oslo_models.sharding.layout import EvenSplit


class RegNetParallel(ResNetParallel):
    """Sharding plan of the RegNet family."""

    def _initialize_constructed(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                bound = prod(self.layouts[f"{name}.weight"].shape[1:]) ** -0.5
                init.uniform_(module.bias, -bound, bound)

    @classmethod
    def plan(cls, config: Any) -> Plan:
        return Plan(
            embed={cls.stem: Replicated()},
            blocks={
                f"encoder.stages.{stage}.layers": cls.grouped(config, width)
                for stage, width in enumerate(config.hidden_sizes)
            },
            head={},
            optional=("shortcut",),
        ).with_rules(single_stage_reason=SMALLER)

    @staticmethod
    def grouped(config: Any, width: int) -> Entries:
        """Return the plan of a block whose convolutions have this number of channels."""
        groups = max(1, width // config.groups_width)
        split, gate = EvenSplit(groups, width // groups), config.layer_type == "y"
        last = f"layer.{2 + gate}"
        gates = {"layer.2.attention.0": RowChannels(split), "layer.2.attention.2": ColumnChannels(split)}
        return {
            "shortcut": Replicated(),
            "layer.0.convolution": ColumnChannels(split),
            "layer.1.convolution": LocalChannels(split),
            **{f"layer.{index}.normalization": LocalChannels(split) for index in range(2)},
            **(gates if gate else {}),
            f"{last}.convolution": RowChannels(split),
            f"{last}.normalization": Replicated(),
        }


class RegNetModel(RegNetParallel, hf.RegNetModel):
    pass


class RegNetForImageClassification(RegNetParallel, hf.RegNetForImageClassification):
    head_plan = CLASSIFIER
