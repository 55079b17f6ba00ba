"""RegNet: ResNet with grouped convolutions, and perhaps a gate per channel. Only pointwise convolutions are divided."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import nn
from transformers import RegNetConfig
from transformers import initialization as init
from transformers.models.regnet import modeling_regnet as hf

from oslo_models.layers.entries import Entries, Replicated
from oslo_models.modeling.heads import CLASSIFIER
from oslo_models.models.bit import GatheredChannels
from oslo_models.models.resnet import ResNetParallel


class RegNetParallel(ResNetParallel):
    """Sharding plan of the RegNet family."""

    def _initialize_constructed(self) -> None:
        for name, module in self.named_modules():
            if isinstance(module, nn.Conv2d) and module.bias is not None:
                bound = prod(self.layouts[f"{name}.weight"].shape[1:]) ** -0.5
                init.uniform_(module.bias, -bound, bound)

    @classmethod
    def block(cls, config: Any) -> Entries:
        gate, last = config.layer_type == "y", f"layer.{2 + (config.layer_type == 'y')}"
        return {
            **{f"{name}.convolution": GatheredChannels(channels=True) for name in ("layer.0", last)},
            **{f"{name}.normalization": Replicated() for name in ("layer.0", last)},
            **dict.fromkeys(("layer.1", "layer.2") if gate else ("layer.1",), Replicated()),
        }


class RegNetModel(RegNetParallel, hf.RegNetModel):
    pass


class RegNetForImageClassification(RegNetParallel, hf.RegNetForImageClassification):
    head_plan = CLASSIFIER
