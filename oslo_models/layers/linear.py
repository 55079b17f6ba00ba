"""Linear layers divided over the tp axis. Subclasses of the layers they replace, so ``isinstance`` still finds those.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels.linear import plain_conv1d
from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.collectives import has_dispatch_mode, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.sharding.layout import Layout


class _ShardedModule(nn.Module):
    """What every divided layer knows: its axis, and the random stream of divided activations if dropout is used."""

    tp: Axis
    stream: ShardedRngStream | None
    weight: Tensor
    bias: Any
    product: ClassVar[Callable[..., Tensor]]
    """Of activations, the weight and a bias, if there is one: ``F.linear``, or what `fusion` puts in its place."""

    def enter_region(self, x: Tensor) -> Tensor:
        """The replicated input of a layer after which activations are divided."""
        if self.stream is not None and self.training:
            self.stream.enter()
        return copy_to(self.tp, x)

    def leave_region(self, x: Tensor) -> Tensor:
        """The divided input of a layer after which activations are replicated.

        To be asked before the layer's product: activation checkpointing recomputes a block up to the last tensor that
        the backward pass needs, and that is often this input.
        """
        if self.stream is not None:
            self.stream.leave()
        return x


class _Column(_ShardedModule):
    """A layer with its outputs divided. Input ``[..., in]`` is replicated, output is ``[..., local_out]``."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(self.enter_region(x), self.weight, self.bias)


class _Row(_ShardedModule):
    """A layer with its inputs divided. Input ``[..., local_in]``, output ``[..., out]`` replicated."""

    def forward(self, x: Tensor) -> Tensor:
        return _add_bias(reduce_from(self.tp, self.product(self.leave_region(x), self.weight)), self.bias)


class ColumnParallelLinear(_Column, nn.Linear):
    """``nn.Linear`` with its outputs divided."""

    product = staticmethod(F.linear)


class KeyValueParallelLinear(ColumnParallelLinear):
    """A column-parallel projection some of whose heads live on several ranks (fewer key-value heads than ranks).

    Each rank sees only the gradient that comes through its own query heads, so gradients of a head are summed over the
    ranks that hold it.
    """

    layouts: dict[str, Layout]

    def forward(self, x: Tensor) -> Tensor:
        weight = SumReplicatedGrad.apply(self.weight, self.tp, self.layouts["weight"])
        bias = None if self.bias is None else SumReplicatedGrad.apply(self.bias, self.tp, self.layouts["bias"])
        return self.product(self.enter_region(x), weight, bias)


class ColumnParallelConv1D(_Column, Conv1D):
    """GPT-2's layer, whose weight is ``[in, out]``, with its outputs divided."""

    product = staticmethod(plain_conv1d)


class RowParallelLinear(_Row, nn.Linear):
    """``nn.Linear`` with its inputs divided."""

    product = staticmethod(F.linear)


class RowParallelConv1D(_Row, Conv1D):
    """GPT-2's layer, whose weight is ``[in, out]``, with its inputs divided."""

    product = staticmethod(plain_conv1d)


def _add_bias(summed: Tensor, bias: Tensor | None) -> Tensor:
    """Add the bias once, after the sum; in place, since autograd does not need the sum, unless it may be kept."""
    if bias is None:
        return summed
    bias = bias.to(summed.dtype)
    return summed + bias if torch.is_grad_enabled() and has_dispatch_mode() else summed.add_(bias)


class SumReplicatedGrad(torch.autograd.Function):
    """Of a parameter: identity forward; backward sums the gradient over the ranks that hold copies of its elements.

    The sum travels in a buffer of the full shape: key-value projections that are replicated are small, and this needs
    no process group beside that of the axis.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        full = grad.new_zeros(ctx.layout.shape)
        ctx.layout.place(full, grad, ctx.axis.rank)
        return ctx.layout.shard(reduce_fresh(ctx.axis, full), ctx.axis.rank).clone(), None, None
