"""Norms, reductions, comparisons and random numbers of shards, which cover the full tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from oslo_models.distributed.callers import computes_in_deepspeed, computes_in_layer
from oslo_models.distributed.collectives import all_gather
from oslo_models.distributed.partial_norm import norm_of_parts, partial_norm
from oslo_models.distributed.sharded_tensor.autograd import Gathered, Total
from oslo_models.distributed.sharded_tensor.tensors import (
    GradientShard,
    Shard,
    WeightView,
    local_tensor,
    mark,
    misses_stages,
    mixing,
    name_of,
    on_local,
    require_all_stages,
    with_graph,
    writes,
)
from oslo_models.sharding.layout import Layout

TRUTHS = (torch.all, Tensor.all, torch.any, Tensor.any)


# Norms ----------------------------------------------------------------------------------------------------------------


def norm(func: Any, args: Any, kwargs: Any) -> Any:
    """``vector_norm(x, ord, dim, keepdim, dtype)`` and its older forms ``norm(x, p, dim, keepdim, dtype)``."""
    shard, *more = args
    names = ("ord" if func is torch.linalg.vector_norm or func is torch.linalg.norm else "p", "dim", "keepdim")
    given = {**dict(zip(names, more, strict=False)), **kwargs}
    order, dim = given.get(names[0]), given.get("dim")
    is_spectral = func is torch.linalg.norm and order is not None and shard.dim() == 2
    order = 2.0 if order is None or order == "fro" else order
    if not isinstance(shard, Shard) or dim is not None or is_spectral or not isinstance(order, (int, float)):
        return mixing(func, args, kwargs)
    is_gradient = isinstance(shard, GradientShard) or misses_stages(shard)
    is_copy = not shard.sharding.is_part and not is_gradient and shard.sharding.counts
    if is_copy or computes_in_deepspeed():
        return on_local(func, args, kwargs)
    if torch.is_grad_enabled() and shard.requires_grad:
        return _norm_with_graph(shard, float(order), kwargs)
    if order <= 0:
        raise ValueError(f"the norm of order {order} of a shard ({shard.sharding}) cannot be computed from parts")
    sharding, order = shard.sharding, float(order)
    dtype = kwargs.get("dtype") or shard.dtype
    parts = [torch.linalg.vector_norm(part, order, dtype=dtype) for part in sharding.counted(local_tensor(shard))]
    norm = torch.linalg.vector_norm(torch.stack(parts), order) if parts else torch.zeros((), dtype=dtype).to(shard)
    if sharding.mesh.is_over_replicas(sharding.layout):  # sums over the model miss the other replicas
        norm = norm_of_parts(sharding.axis, norm, order) * (sharding.mesh.tp.rank == 0)
    return partial_norm(norm, sharding.mesh, order, is_gradient or not sharding.counts)


def _norm_with_graph(shard: Shard, order: float, kwargs: dict[str, Any]) -> Tensor:
    """Return the norm of a weight as a differentiable loss term."""
    if not shard.sharding.counts:
        raise RuntimeError(
            f"the norm of {shard.sharding.name} is the norm of a tied weight that counts on another stage: leave it "
            "out of the loss of this stage"
        )
    dtype = kwargs.get("dtype")
    values = with_graph(shard) if dtype is None else with_graph(shard).to(dtype)
    if not 1 <= order < float("inf"):
        return torch.linalg.vector_norm(Gathered.apply(values, shard.sharding), order)
    total = Total.apply(values.square() if order == 2 else values.abs().pow(order), shard.sharding)
    is_zero = total == 0  # the gradient of torch's norm is zero there
    return torch.where(is_zero, total, torch.where(is_zero, 1.0, total).pow(1.0 / order))


def foreach_norm(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, order = args[0], (args[1] if len(args) > 1 else kwargs.get("ord", 2))
    return tuple(torch.linalg.vector_norm(tensor, order, dtype=kwargs.get("dtype")) for tensor in tensors)


# Reductions of all elements -------------------------------------------------------------------------------------------


def total(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``sum(x, dtype=...)`` and ``mean(x, dtype=...)``."""
    if len(args) == 1 and kwargs.keys() <= {"dtype"}:
        require_all_stages(func, args)
    if not _reduces_shard(args, kwargs, "dtype"):
        return mixing(func, args, kwargs)
    values, sharding = with_graph(args[0]), args[0].sharding
    is_mean = name_of(func) == "mean"
    if is_mean and not (values.is_floating_point() or kwargs.get("dtype")):
        return mixing(func, args, kwargs)
    exact = values.dtype if values.is_floating_point() else torch.int64
    total: Tensor = Total.apply(values.to(kwargs.get("dtype") or exact), sharding)
    return total / torch.Size(sharding.layout.shape).numel() if is_mean else total


def extreme(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``max``, ``min``, ``amax``, ``amin``, ``all`` and ``any`` of all elements."""
    if len(args) == 1 and not kwargs:
        require_all_stages(func, args)
    if not _reduces_shard(args, kwargs):
        return mixing(func, args, kwargs)
    if torch.is_grad_enabled() and args[0].requires_grad:
        return func(args[0].full_tensor())
    local, sharding = local_tensor(args[0]), args[0].sharding
    parts = [_owned(local, sharding.layout, rank) for rank in range(sharding.axis.size)]
    mine = parts[sharding.axis.rank]
    found = func(mine)[None] if mine.numel() else mine
    is_bool = func in TRUTHS
    counts = [min(part.numel(), 1) for part in parts]
    return func(all_gather(sharding.axis, found.byte() if is_bool else found, 0, counts)).to(found.dtype)


def _owned(local: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the elements that count on a rank as a flat tensor. For other ranks, only its size is meaningful."""
    source = local if local.shape == layout.local_shape(rank) else local.new_empty(layout.local_shape(rank))
    return torch.cat([local.new_empty(0), *(source[here].flatten() for _, here in layout.owned_indices(rank))])


def comparison(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``equal(x, y)`` and ``allclose(x, y, ...)``, equal on all ranks. ``y`` may be a shard or a full tensor."""
    shards = [arg for arg in args[:2] if isinstance(arg, Shard)]
    if not shards or len(args) < 2 or any(isinstance(arg, WeightView) for arg in args):
        return mixing(func, args, kwargs)
    sharding = shards[0].sharding
    if sharding.is_part and args[0].shape != args[1].shape:
        args = (*(arg.full_tensor() if isinstance(arg, Shard) else arg for arg in args[:2]), *args[2:])
        return func(*args, **kwargs)
    is_same = on_local(func, args, kwargs)
    if not sharding.is_part:
        return is_same
    flags = torch.tensor([is_same], dtype=torch.uint8, device=shards[0].device)
    return bool(all_gather(sharding.axis, flags, 0, [1] * sharding.axis.size).all())


def _reduces_shard(args: Any, kwargs: Any, *options: str) -> bool:
    """Return whether a call reduces all elements of a shard, outside of its layer."""
    is_whole = len(args) == 1 and isinstance(args[0], Shard) and kwargs.keys() <= set(options)
    return is_whole and args[0].sharding.is_part and not computes_in_layer(args[0].sharding)


# Random numbers -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def drawn(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle random initialization: each rank draws the full tensor and keeps its shard."""
    sharding = args[0].sharding if isinstance(args[0], Shard) else None
    if misses_stages(args[0]):
        raise RuntimeError(
            f"{name_of(func)} of a gradient ({sharding}) would draw the same numbers on every pipeline stage: draw "
            "torch.randn(grad.shape, generator=generator) with a generator of another seed on each stage"
        )
    if sharding is None or len([arg for arg in tree_leaves((args, kwargs)) if isinstance(arg, Tensor)]) > 1:
        return mixing(func, args, kwargs)
    local = local_tensor(args[0])
    full = func(local.new_empty(sharding.layout.shape), *args[1:], **kwargs)
    part = sharding.layout.shard(full, sharding.axis.rank)
    if not writes(func):
        return mark(part.clone(), sharding, Shard)
    local.copy_(part)
    return args[0]
