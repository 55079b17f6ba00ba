"""Modules that apply the filters of a depthwise convolution inside them by themselves, to the channels of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.custom_layers import hidden
from oslo_models.layers.linear import SumReplicatedGrad
from oslo_models.sharding.layout import Layout


class ShortConvolutionModule(nn.Module):
    """Mixed in before the class of such a module.

    Attributes:
        convolution: the name of the convolution.
        filters: the layouts of its parameters. Ranks with heads of one group hold the same filters of what the group
            shares, and each has only the gradient that comes from its own heads.
    """

    tp: Axis
    convolution: str
    filters: Mapping[str, Layout]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        convolution = getattr(self, self.convolution)
        summed = {
            name: SumReplicatedGrad.apply(getattr(convolution, name), self.tp, layout)
            for name, layout in self.filters.items()
            if layout.overlaps
        }
        with without_override(), hidden(convolution, summed):
            return super().forward(*args, **kwargs)
