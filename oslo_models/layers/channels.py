"""Convolutions and norms of images ``[rows, channels, height, width]``, sharded by channels over the tp axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.linear import ColumnParallel, RowParallel, add_bias
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True)
class ColumnChannels(ColumnParallel):
    """Shard the output channels of a convolution. The input is replicated.

    Args:
        splits: as for ``ColumnParallel``, such as the groups of a grouped convolution behind it.
        drops_rows: whether layers up to the next `RowChannels` drop whole rows. All ranks draw the same numbers then.
    """

    drops_rows: bool = False

    def __init__(self, *splits: EvenSplit, drops_rows: bool = False) -> None:
        super().__init__(*splits)
        object.__setattr__(self, "drops_rows", drops_rows)

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        if shape[0] < n:
            raise ValueError(
                f"a convolution with {shape[0]} channels cannot be sharded over tensor_parallel_size={n} ranks, since "
                f"some ranks would have none: use at most {shape[0]}"
            )
        return super().layout(leaf, shape, n)


class GatheredChannels(ColumnChannels):
    """Shard the output channels of a convolution between unsharded layers: all its outputs are read."""


class RowChannels(RowParallel):
    """Shard the input channels of a convolution. Partial outputs are all-reduced, then the bias is added.

    Args: as for ``ColumnParallel``.
    """

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if leaf == "bias" else self._sharded(shape, 1, n)


class LocalChannels(ColumnParallel):
    """Shard a layer that computes channels, or groups of them, separately. Its input has the local channels.

    Such layers are depthwise and grouped convolutions, and batch norms with their running statistics.

    Args: as for ``ColumnParallel``.
    """

    shards_buffers = True


@shards(ColumnChannels, nn.Conv2d)
class ColumnParallelConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded output channels."""

    drops_rows: bool

    def configure(self, entry: ColumnChannels, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.drops_rows = entry.drops_rows

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return super().forward(copy_to(self.tp, x) if self.drops_rows else self.enter_region(x))


@shards(GatheredChannels, nn.Conv2d)
class GatheredConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded output channels, which are gathered."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            local = super().forward(copy_to(self.tp, x))
        return gather_from(self.tp, local, 1, [stop - start for ((start, stop),) in self.layouts["weight"].ranges])


@shards(RowChannels, nn.Conv2d)
class RowParallelConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with sharded input channels."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            partial = self._conv_forward(self.leave_region(x), self.weight, None)
            return add_bias(reduce_from(self.tp, partial), None if self.bias is None else self.bias[:, None, None])


@shards(LocalChannels, nn.Conv2d)
class GroupedConvolution(ShardedModule, nn.Conv2d):
    """``nn.Conv2d`` with the filters of the local channels."""

    def configure(self, entry: Any, context: ShardingContext) -> None:
        super().configure(entry, context)
        start, stop = self.layouts["weight"].ranges[context.tp.rank][0]
        self.groups = self.groups * (stop - start) // self.out_channels

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return super().forward(x)


@shards(LocalChannels, _BatchNorm)
class LocalBatchNorm(ShardedModule, _BatchNorm):
    """Batch norm of the local channels."""

    def forward(self, x: Tensor) -> Tensor:
        with layer_context(self.weight):
            return super().forward(x)
