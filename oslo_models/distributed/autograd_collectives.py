"""Collectives with a backward pass: Megatron's conjugate pairs as autograd functions.

Sources: Shoeybi et al., "Megatron-LM", 2019, figure 3 (``f`` is `copy_to`, ``g`` is `reduce_from`); Korthikanti et al.,
"Reducing Activation Recomputation in Large Transformer Models", 2022, figure 5 (``g`` is `gather_to`, its conjugate
`reduce_scatter_from`). On an axis of size one all of them return their input. The backward pass of one function of a
pair is the other function, so derivatives of every order are exact. Without a gradient, the backward pass returns none:
zeros would give gradients to the weights of unused layers, and optimizers would decay them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oslo_models.distributed.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    has_dispatch_mode,
    reduce_fresh,
    reduce_scatter,
)
from oslo_models.distributed.mesh import Axis


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        return x.detach()  # not a view: a view would keep its base alive, and the base keeps this copy (see `copy_to`)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        # The autograd engine may pass the same gradient elsewhere, so do not sum it in place.
        grad = grad.clone(memory_format=torch.contiguous_format)
        return (_ReduceFrom.apply(grad, ctx.axis) if _has_graph(grad) else reduce_fresh(ctx.axis, grad)), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        if not has_dispatch_mode():
            ctx.mark_dirty(x)
        return reduce_fresh(axis, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        if grad is None:
            return None, None
        return (_CopyTo.apply(grad, ctx.axis) if _has_graph(grad) else grad), None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return all_gather(axis, x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _ScatterTo.apply(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        return x.narrow(dim, sum(sizes[: axis.rank]), sizes[axis.rank]).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _GatherFrom.apply(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _GatherTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        ctx.set_materialize_grads(False)
        return all_gather(axis, x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        return _ReduceScatterFrom.apply(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _ReduceScatterFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.axis, ctx.dim, ctx.sizes = axis, dim, sizes
        ctx.set_materialize_grads(False)
        return reduce_scatter(axis, x, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        return _GatherTo.apply(grad, ctx.axis, ctx.dim, ctx.sizes), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, sent: Sequence[int], received: Sequence[int], *tensors: Tensor) -> Any:
        ctx.axis, ctx.sent, ctx.received = axis, sent, received
        return tuple(all_to_all(axis, x, sent, received) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Unused gradients are zeros here, so that all ranks exchange the same tensors in the same order.
        return None, None, None, *_Exchange.apply(ctx.axis, ctx.received, ctx.sent, *grads)


class _AverageGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, count: int) -> Tensor:
        ctx.axis, ctx.count = axis, count
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = grad / ctx.count
        return (_ReduceFrom.apply(grad, ctx.axis) if _has_graph(grad) else reduce_fresh(ctx.axis, grad)), None, None


def _has_graph(grad: Tensor) -> bool:
    """Return whether a backward pass is itself recorded (``create_graph=True``)."""
    return torch.is_grad_enabled() and grad.requires_grad


def exchange(axis: Axis, tensors: Sequence[Tensor], sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, ...]:
    """Exchange rows of several tensors over the axis (`all_to_all`). The backward pass sends their gradients back.

    Args:
        tensors: ``[sum(sent), ...]`` each.
        sent: the number of rows for each rank.
        received: the number of rows from each rank.

    Returns:
        ``[sum(received), ...]`` each.
    """
    exchanged: tuple[Tensor, ...] = _Exchange.apply(axis, sent, received, *tensors)
    return exchanged


def average_grad(axis: Axis, x: Tensor, count: int) -> Tensor:
    """Identity forward; sum of the gradient over the axis, divided by ``count``, backward."""
    return _AverageGrad.apply(x, axis, count) if torch.is_grad_enabled() and x.requires_grad else x


def copy_to(axis: Axis, x: Tensor) -> Tensor:
    """Pass a replicated tensor to sharded layers: identity forward, all-reduce of the gradient backward.

    Sibling layers that read the same tensor (query, key and value; attention and MLP of a parallel residual; the
    cross-attentions of all decoder blocks) share one copy: their gradients are added up locally and all-reduced once.
    The copy is cached on the tensor, unless the tensor is a leaf: its graph would then never be freed.
    """
    if axis.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
        return x
    if torch.compiler.is_compiling() or x.is_leaf:
        return _CopyTo.apply(x, axis)
    cached: tuple[Tensor, Axis, int] | None = getattr(x, "_oslo_copy", None)
    if cached is not None and cached[1] is axis and cached[2] == x._version:
        return cached[0]
    copy = _CopyTo.apply(x, axis)
    x._oslo_copy = (copy, axis, x._version)  # type: ignore[attr-defined]
    return copy


def reduce_from(axis: Axis, x: Tensor) -> Tensor:
    """Sum partial results over the axis forward, identity backward.

    Args:
        x: a temporary. The sum overwrites it.
    """
    if axis.size == 1:
        return x
    if not torch.is_grad_enabled():  # no backward pass; this also saves decoding the checks of `reduce_fresh`
        return all_reduce(axis, x)
    if not x.requires_grad:
        return reduce_fresh(axis, x)
    return _ReduceFrom.apply(x, axis)


def gather_from(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the shards of all ranks along ``dim`` forward; take the local shard of the gradient backward.

    Args:
        sizes: the size of each rank's shard along ``dim``; they may differ.
    """
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dim % x.dim(), sizes)


def scatter_to(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Take the local shard of a replicated tensor forward; concatenate the gradients of all ranks backward.

    Args:
        sizes: the size of each rank's shard along ``dim``; they may differ.
    """
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dim % x.dim(), sizes)


def gather_to(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Pass the parts of all ranks to sharded layers: concatenation along ``dim`` forward, reduce-scatter backward.

    Args:
        sizes: the size of each rank's part along ``dim``; they may differ.
    """
    return x if axis.size == 1 else _GatherTo.apply(x, axis, dim % x.dim(), sizes)


def reduce_scatter_from(axis: Axis, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Sum partial results over the axis and keep the own part along ``dim`` forward; concatenate gradients backward.

    Args:
        sizes: the size of each rank's part along ``dim``; they may differ.
    """
    return x if axis.size == 1 else _ReduceScatterFrom.apply(x, axis, dim % x.dim(), sizes)
