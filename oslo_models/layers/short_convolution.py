"""Modules that apply the filters of their depthwise convolution directly, to the local channels."""

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
    """Mixin before the class of such a module.

    Attributes:
        convolution: name of the convolution.
        filters: layouts of its parameters. Ranks with heads of one group replicate the filters of that group's shared
            channels. Each rank computes only the gradient from its local heads, so the gradients are summed.
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
