"""Collectives on shards with gradients of every order.

Each function of a pair is the backward pass of the other: `Gathered` and `Part`, `Total` and `Spread`. Copies of an
element on several ranks count as one variable: each copy receives the full gradient, as in the layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor.sharding import Sharding
from oslo_models.sharding.layout import Layout

without_override = torch._C.DisableTorchFunctionSubclass
"""Context in which shards act as plain tensors at no cost. Layers compute with their own shards in it."""


@torch.no_grad()
def gather_local(axis: Axis, shard: Tensor, layout: Layout) -> Tensor:
    """Gather the full tensor from plain tensors, bit for bit, on every rank of the axis. A collective of the axis."""
    if layout.dim is None:
        return shard.clone()
    full = shard.new_zeros(layout.shape)
    for there, here in layout.owned_indices(axis.rank):
        full[there] = shard[here]
    # Sum bytes instead of numbers, since -0.0 + 0.0 is 0.0.
    all_reduce(axis, full.view(torch.uint8) if full.dim() else full)
    return full


class Gathered(torch.autograd.Function):
    """Gather the full tensor from shards. Its gradient is equal on all ranks; each rank takes its shard of it."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        with without_override():
            plain = local.detach().as_subclass(Tensor)
        return gather_local(sharding.axis, plain, sharding.layout)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return (Part.apply(grad, ctx.sharding) if ctx.sharding.is_part else grad), None


class Part(torch.autograd.Function):
    """Take the local shard of a full tensor that is equal on all ranks."""

    @staticmethod
    def forward(ctx: Any, full: Tensor, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return sharding.layout.shard(full.detach(), sharding.axis.rank).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Gathered.apply(grad, ctx.sharding), None


class Total(torch.autograd.Function):
    """Sum all elements of the full tensor, on every rank."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, sharding: Sharding) -> Tensor:
        ctx.shape, ctx.sharding = local.shape, sharding
        parts = [local[here].sum() for _, here in sharding.layout.owned_indices(sharding.axis.rank)]
        return all_reduce(sharding.axis, torch.stack(parts).sum() if parts else local.new_zeros(()))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Spread.apply(grad, ctx.shape, ctx.sharding), None


class Spread(torch.autograd.Function):
    """Expand a number that is equal on all ranks to the shape of a shard."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, shape: torch.Size, sharding: Sharding) -> Tensor:
        ctx.sharding = sharding
        return number.detach().expand(shape).clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Total.apply(grad, ctx.sharding), None, None
