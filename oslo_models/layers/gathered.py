"""Layers of derived plans. Any code may call them, since their outputs behave like the full output.

They keep the sizes of the full layer (``out_features``), which the calling code may read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import untimed_conv1d, untimed_linear
from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers import activation_products, activation_shapes  # noqa: F401  registers the rules
from oslo_models.layers.full_weights import full_weight, is_model_code, reads_shards
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.linear import ColumnParallel, RowParallel, add_bias
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec
from oslo_models.layers.vocab_parallel import VocabParallel, VocabParallelEmbedding
from oslo_models.sharding.entry import Replicated
from oslo_models.sharding.layout import EvenSplit, Layout


@dataclass(frozen=True, init=False)
class GatheredColumn(ColumnParallel):
    """Linear layer with sharded output features. The output is gathered when an operation needs it in full.

    Args:
        units: number of indivisible units (attention heads) of each matrix. ``None`` splits single features. With more
            ranks than units, single features are split too, and the output is gathered at once.
        parts: number of matrices of equal size that the weight concatenates.
        lazy: keep the output sharded, as a `ShardedActivation`, until an operation needs it in full.
        transposed: see `ColumnParallel`.
    """

    units: int | None = None
    lazy: bool = False

    def __init__(self, units: int | None = None, parts: int = 1, lazy: bool = False, transposed: bool = False) -> None:
        super().__init__(parts=parts, transposed=transposed)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "lazy", lazy)

    def is_lazy(self, n: int) -> bool:
        """Return whether the output stays sharded over ``n`` ranks."""
        return self.lazy and (self.units is None or self.units >= n)

    def split(self, size: int, n: int) -> EvenSplit:
        """Return the split over ``n`` ranks of each matrix of a weight with ``size`` features in total."""
        inner = size // self.parts
        units = inner if self.units is None or self.units < n else self.units
        return EvenSplit(units, inner // units)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        if shape[dim] // self.parts < n:
            return Layout(shape)  # such as a classifier of two classes over three ranks
        return Layout.sharded(shape, dim, (self.split(shape[dim], n),) * self.parts, n)


@dataclass(frozen=True, init=False)
class SlicedRow(RowParallel):
    """Linear layer with sharded input features. A full input is sliced first.

    Args:
        units: number of indivisible units of the input, equal to ``units`` of the preceding `GatheredColumn`.
        transposed: see `ColumnParallel`.
    """

    units: int | None = None

    def __init__(self, units: int | None = None, transposed: bool = False) -> None:
        super().__init__(transposed=transposed)
        object.__setattr__(self, "units", units)

    def split(self, size: int, n: int) -> EvenSplit:
        """Return the split over ``n`` ranks of a weight with ``size`` input features."""
        return GatheredColumn(self.units).split(size, n)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout(shape) if shape[dim] < n else Layout.sharded(shape, dim, (self.split(shape[dim], n),), n)


@dataclass(frozen=True, init=False)
class HeadsRow(SlicedRow):
    """Output projection of an ``nn.MultiheadAttention``, which sums over the heads."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if (self.units or 0) < n else super().layout(leaf, shape, n)


@dataclass(frozen=True)
class GatheredConvolution(Replicated):
    """Convolution with sharded output channels, which are gathered at once.

    Args:
        transposed: the weight is stored ``[in, out, ...]``, as in transposed convolutions.
    """

    transposed: bool = False

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        dim = 1 if self.transposed and leaf == "weight" else 0
        return Layout(shape) if shape[dim] < n else Layout.sharded(shape, dim, (EvenSplit(shape[dim]),), n)


@dataclass(frozen=True)
class SummedEmbedding(VocabParallel):
    """Embedding with sharded rows and all-reduced outputs."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if shape[0] < n else super().layout(leaf, shape, n)


def call_by_itself(module: nn.Module, args: Any) -> None:
    """Hook that does nothing. It makes torch's modules call the layer instead of reading its weights."""


class DerivedLayer(ShardedModule):
    """Base of these layers.

    Attributes:
        entry: plan entry of the layer.
    """

    entry: Any
    weight: Tensor
    bias: Any
    product: ClassVar[Callable[..., Tensor]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "forward" in vars(cls):
            cls.forward = reads_shards(cls.forward)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if is_model_code() and name in self._parameters:
            return value if value is None else full_weight(self.tp, value, self.layouts[name])
        return value

    def configure(self, entry: Any, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.entry = entry
        self.register_forward_pre_hook(call_by_itself)


class _GatheredColumn(DerivedLayer):
    """Input ``[..., in]`` and output ``[..., out]`` are full tensors or `ShardedActivation`."""

    entry: GatheredColumn

    def forward(self, x: Tensor) -> Tensor:
        layout, n = self.layouts["weight"], self.tp.size
        x = x.full() if isinstance(x, ShardedActivation) else x
        if layout.dim is None:
            return self.product(x, self.weight, self.bias)
        with layer_context(self.weight):
            local = self.product(copy_to(self.tp, x), self.weight, self.bias)
        size = layout.shape[layout.dim]
        spec = ShardSpec(local.dim() - 1, self.entry.split(size, n).count, self.entry.parts)
        activation = ShardedActivation.from_local(local, self.tp, spec, size)
        return activation if self.entry.is_lazy(n) and not torch.compiler.is_compiling() else activation.full()


@shards(GatheredColumn, nn.Linear)
class GatheredColumnLinear(_GatheredColumn, nn.Linear):
    """``nn.Linear`` with sharded output features."""

    product = staticmethod(untimed_linear)


@shards(GatheredColumn, Conv1D)
class GatheredColumnConv1D(_GatheredColumn, Conv1D):
    """``Conv1D`` with sharded output features."""

    product = staticmethod(untimed_conv1d)


class _SlicedRow(DerivedLayer):
    """Input ``[..., in]`` is a `ShardedActivation`, or a full tensor that is sliced. Output ``[..., out]`` is full."""

    entry: SlicedRow

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layouts["weight"]
        if layout.dim is None:
            return self.product(x.full() if isinstance(x, ShardedActivation) else x, self.weight, self.bias)
        split = self.entry.split(layout.shape[layout.dim], self.tp.size)
        if isinstance(x, ShardedActivation) and x.spec == ShardSpec(x.dim() - 1, split.count):
            x = x.local()
        else:
            x = x.full() if isinstance(x, ShardedActivation) else x
            x = scatter_to(self.tp, x, -1 % x.dim(), [stop - start for start, stop in split.ranges(self.tp.size)])
        with layer_context(self.weight):
            return add_bias(reduce_from(self.tp, self.product(x, self.weight, None)), self.bias)


@shards(SlicedRow, nn.Linear)
@shards(HeadsRow, nn.Linear)
class SlicedRowLinear(_SlicedRow, nn.Linear):
    """``nn.Linear`` with sharded input features."""

    product = staticmethod(untimed_linear)


@shards(SlicedRow, Conv1D)
class SlicedRowConv1D(_SlicedRow, Conv1D):
    """``Conv1D`` with sharded input features."""

    product = staticmethod(untimed_conv1d)


@shards(GatheredConvolution, nn.modules.conv._ConvNd)
class GatheredConvolutionLayer(DerivedLayer):
    """Convolution ``[rows, in, ...]`` to ``[rows, out, ...]`` with sharded output channels, gathered at once."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        x = x.full() if isinstance(x, ShardedActivation) else x
        layout = self.layouts["weight"]
        if layout.dim is None:
            return super().forward(x, *args, **kwargs)
        with layer_context(self.weight):
            local = super().forward(copy_to(self.tp, x), *args, **kwargs)
        channels = local.dim() - (self.weight.dim() - 1)
        return gather_from(self.tp, local, channels, [stop - start for ((start, stop),) in layout.ranges])


@shards(SummedEmbedding, nn.Embedding)
class SummedEmbeddingLayer(DerivedLayer, VocabParallelEmbedding):
    """``nn.Embedding`` with sharded rows."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.layouts["weight"].dim is None:
            return nn.Embedding.forward(self, ids)
        return VocabParallelEmbedding.forward(self, ids)
