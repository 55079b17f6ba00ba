"""Convolutions and norms of images ``[rows, channels, height, width]``, sharded by channels over the tp axis.

Their entries are ``ColumnParallel(channels=True)`` and ``RowParallel(channels=True)``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.linear import ColumnParallel, RowParallel, add_bias


@shards(ColumnParallel, nn.Conv2d)
class ColumnParallelConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded output channels. The input is replicated.

    The input of a depthwise or grouped convolution has the local channels.
    """

    def configure(self, entry: Any, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.is_local = self.groups > 1
        start, stop = self.layouts["weight"].ranges[context.tp.rank][0]
        self.groups = max(1, self.groups * (stop - start) // self.out_channels)

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return super().forward(x if self.is_local else self.enter_region(x))


@shards(RowParallel, nn.Conv2d)
class RowParallelConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded input channels. Partial outputs are all-reduced, then the bias is added."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            partial = self._conv_forward(self.leave_region(x), self.weight, None)
            return add_bias(reduce_from(self.tp, partial), None if self.bias is None else self.bias[:, None, None])


@shards(ColumnParallel, nn.BatchNorm2d)
class LocalBatchNorm(ShardedModule, nn.BatchNorm2d):
    """Batch norm of the local channels."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return super().forward(x)
