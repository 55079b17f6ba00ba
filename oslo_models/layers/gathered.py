"""Layers of derived plans. Any code may call them, since their outputs behave like the full output.

They keep the sizes of the full layer (``out_features``), which the calling code may read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import many_rows_conv1d, many_rows_linear
from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.distributed.sharded_tensor import layer_context
from oslo_models.layers import activation_products, activation_shapes  # noqa: F401  registers the rules
from oslo_models.layers.linear import _add_bias, _ShardedModule
from oslo_models.layers.sharded_activation import Mark, ShardedActivation
from oslo_models.layers.vocab_parallel import VocabParallelEmbedding
from oslo_models.sharding.derived import GatheredColumn, SlicedRow
from oslo_models.sharding.layout import Layout


def call_by_itself(module: nn.Module, args: Any) -> None:
    """Hook that does nothing. It makes torch's modules call the layer instead of reading its weights."""


class DerivedLayer(_ShardedModule):
    """Base of these layers.

    Attributes:
        entry: plan entry of the layer.
    """

    entry: Any
    layouts: dict[str, Layout]


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
        mark = Mark(local.dim() - 1, self.entry.split(size, n).count, self.entry.parts)
        activation = ShardedActivation.from_local(local, self.tp, mark, size)
        return activation if self.entry.is_lazy(n) and not torch.compiler.is_compiling() else activation.full()


class GatheredColumnLinear(_GatheredColumn, nn.Linear):
    """``nn.Linear`` with sharded output features."""

    product = staticmethod(many_rows_linear)


class GatheredColumnConv1D(_GatheredColumn, Conv1D):
    """``Conv1D`` with sharded output features."""

    product = staticmethod(many_rows_conv1d)


class _SlicedRow(DerivedLayer):
    """Input ``[..., in]`` is a `ShardedActivation`, or a full tensor that is sliced. Output ``[..., out]`` is full."""

    entry: SlicedRow

    def forward(self, x: Tensor) -> Tensor:
        layout = self.layouts["weight"]
        if layout.dim is None:
            return self.product(x.full() if isinstance(x, ShardedActivation) else x, self.weight, self.bias)
        split = self.entry.split(layout.shape[layout.dim], self.tp.size)
        if isinstance(x, ShardedActivation) and x.mark == Mark(x.dim() - 1, split.count):
            x = x.local()
        else:
            x = x.full() if isinstance(x, ShardedActivation) else x
            x = scatter_to(self.tp, x, -1 % x.dim(), [stop - start for start, stop in split.ranges(self.tp.size)])
        with layer_context(self.weight):
            return _add_bias(reduce_from(self.tp, self.product(x, self.weight, None)), self.bias)


class SlicedRowLinear(_SlicedRow, nn.Linear):
    """``nn.Linear`` with sharded input features."""

    product = staticmethod(many_rows_linear)


class SlicedRowConv1D(_SlicedRow, Conv1D):
    """``Conv1D`` with sharded input features."""

    product = staticmethod(many_rows_conv1d)


class GatheredConvolution(DerivedLayer):
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


class SummedEmbedding(DerivedLayer, VocabParallelEmbedding):
    """``nn.Embedding`` with sharded rows."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.layouts["weight"].dim is None:
            return nn.Embedding.forward(self, ids)
        return VocabParallelEmbedding.forward(self, ids)
