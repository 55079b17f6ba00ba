"""Gradients of elements that several ranks hold, such as replicated key-value heads."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.sharding.layout import Layout


class SumReplicatedGrad(torch.autograd.Function):
    """Identity in the forward pass. The backward pass sums a gradient over the ranks with the same elements.

    The gradient is all-reduced in a buffer of the full shape. Replicated key-value projections are small, and this
    needs no further process groups.
    """

    @staticmethod
    def forward(ctx: Any, param: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        ctx.set_materialize_grads(False)
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        return _SumReplicated.apply(grad, ctx.axis, ctx.layout), None, None


class _SumReplicated(torch.autograd.Function):
    """Backward pass of `SumReplicatedGrad`. `SumReplicatedGrad` is the backward pass of this function in turn."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, axis: Axis, layout: Layout) -> Tensor:
        ctx.axis, ctx.layout = axis, layout
        return sum_replicated(grad, axis, layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return SumReplicatedGrad.apply(grad, ctx.axis, ctx.layout), None, None


def summed_over_copies(layer: Any, leaf: str) -> Any:
    """Return a parameter. Its gradient, if any, is summed over the ranks that hold the same elements."""
    param = getattr(layer, leaf)
    if param is None or not param.requires_grad:
        return param
    return SumReplicatedGrad.apply(param, layer.tp, layer.layouts[leaf])


def sum_replicated(grad: Tensor, axis: Axis, layout: Layout) -> Tensor:
    """Sum the gradient of a shard over the ranks that hold the same elements."""
    full = grad.new_zeros(layout.shape)
    layout.write_shard(full, grad, axis.rank)
    return layout.shard(reduce_fresh(axis, full), axis.rank).clone()
