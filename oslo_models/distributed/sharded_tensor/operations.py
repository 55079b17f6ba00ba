"""Elementwise functions, casts, views and products of shards."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.callers import (
    computes_hash,
    computes_in_layer,
    computes_in_owner,
    computes_initial_bounds,
    is_called_by_operation,
    is_read_by_ddp,
    require_replicas_in_ddp,
    require_replicas_in_fully_shard,
)
from oslo_models.distributed.sharded_tensor.autograd import without_override
from oslo_models.distributed.sharded_tensor.tensors import (
    PLAIN,
    GradientShard,
    Shard,
    ShardedParameter,
    WeightView,
    advice,
    mark,
    mark_view,
    mixing,
    name_of,
    of_one_stage,
    on_local,
    with_graph,
    writes,
)


def elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle elementwise functions, such as the creation and update of optimizer states."""
    given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, (Shard, WeightView))]
    if torch.is_grad_enabled() and given and given[0].sharding.is_part:
        start = int(writes(func))
        args = (*args[:start], *(_copied(arg, given[0]) for arg in args[start:]))
    result = on_local(func, args, kwargs)
    if not given or type(result) is not Tensor or any(result is arg for arg in args):
        _require_one_layout(func, given)
        return result
    shard = given[0]
    if isinstance(shard, Shard) and result.shape == shard.shape:
        _require_one_layout(func, given)
        return _mark_result(result, given)
    return mark_view(result, given) if _stays_marked(shard) else result


def _copied(operand: Any, shard: Shard | WeightView) -> Any:
    """Make the gradient of a replicated operand a sum over ranks, since each rank computes a part of it."""
    if not isinstance(operand, Tensor) or isinstance(operand, (Shard, WeightView)) or not operand.requires_grad:
        return operand
    from_last = shard.dim() - (shard.sharding.layout.dim or 0)
    is_spread = operand.numel() == 1 or (
        isinstance(shard, Shard) and (operand.dim() < from_last or operand.shape[-from_last] == 1)
    )
    if not is_spread or computes_in_layer(shard.sharding):
        return operand
    if shard.sharding.layout.overlaps:  # the sum would count copies of an element repeatedly
        raise RuntimeError(
            f"a tensor with gradients meets a shard ({shard.sharding}) with copies on several ranks: pass its "
            "full_tensor()"
        )
    return copy_to(shard.sharding.axis, operand)


def elementwise_lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``torch._foreach_*`` and fused optimizer steps."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    for given in zip(*lists, strict=False):
        shards = [arg for arg in given if isinstance(arg, (Shard, WeightView))]
        if any(isinstance(arg, WeightView) and arg.sharding.is_part for arg in shards):
            return mixing(func, args, kwargs)
        _require_one_layout(func, shards)
    results = on_local(func, args, kwargs)
    for result, *of_result in zip(results or (), *lists, strict=False):
        shards = [arg for arg in of_result if isinstance(arg, (Shard, WeightView))]
        if shards and type(result) is Tensor and not any(result is arg for arg in of_result):
            (_mark_result if isinstance(shards[0], Shard) else mark_view)(result, shards)
    return results


def _mark_result(result: Tensor, given: Sequence[Any]) -> Tensor:
    """Mark the result of an elementwise function as a shard like its arguments."""
    marked: Shard = mark(result, given[0].sharding, Shard)
    if any(isinstance(arg, Shard) and arg.of_gradient for arg in given):
        marked.of_gradient = True
    return marked


def _require_one_layout(func: Any, given: Sequence[Any]) -> None:
    """Raise ``RuntimeError`` if two shards hold elements at different positions of their full tensors."""
    for other in given[1:]:
        one, two = given[0].sharding, other.sharding
        if one is two or one.layout == two.layout or not (one.is_part or two.is_part) or computes_in_layer(one):
            continue
        raise RuntimeError(
            f"{name_of(func)} would combine elements of different places: {one} and {two}. Pass the result of "
            "full_tensor()"
        )


def elementwise_of_view(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle elementwise functions of a view. Writes raise: they could affect other elements than on one process."""
    written = args[0] if args and writes(func) else kwargs.get("out")
    if isinstance(written, WeightView) and written.sharding.is_part:
        return mixing(func, args, kwargs)
    return elementwise(func, args, kwargs)


def gradients(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``torch.autograd.grad(outputs, inputs)``. Gradients of shards are shards."""
    inputs = kwargs["inputs"] if "inputs" in kwargs else args[1]
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    grads = on_local(func, args, kwargs)
    for given, grad in zip(inputs, grads, strict=True):
        if isinstance(given, Shard) and type(grad) is Tensor:
            mark(grad, given.sharding, GradientShard)
    return grads


def where(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``where(condition, x, y)``. With only a condition, it returns positions."""
    return (mixing if len(args) + len(kwargs) == 1 else elementwise)(func, args, kwargs)


def _stays_marked(tensor: Any) -> bool:
    """Return whether functions of other elements of a tensor have to know that they hold a part of the model."""
    return of_one_stage(tensor) or (tensor.sharding.is_part and not computes_in_layer(tensor.sharding))


def copy(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.copy_(values)`` with values of the local shard or of the full tensor."""
    target, values = args[0], args[1] if len(args) > 1 else kwargs.get("src")
    is_plain = isinstance(target, Shard) and target.sharding.is_part and type(values) in PLAIN
    if is_plain and values.shape == target.sharding.layout.shape:
        part = target.sharding.layout.shard(values, target.sharding.axis.rank)
        args, kwargs = (target, part, *args[2:]), {key: value for key, value in kwargs.items() if key != "src"}
    return (elementwise_of_view if isinstance(target, WeightView) else elementwise)(func, args, kwargs)


def set_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.data = values`` with values of the local shard or of the full tensor."""
    target, values = args
    if isinstance(target, Shard) and target.sharding.is_part and type(values) in PLAIN:
        layout, rank = target.sharding.layout, target.sharding.axis.rank
        if values.shape == layout.shape and values.shape != layout.local_shape(rank):
            values = layout.shard(values, rank).clone()
    return on_local(func, (target, values), kwargs)


def as_array(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.numpy()``, which is refused except for hashes of weights."""
    return (on_local if computes_hash() else mixing)(func, args, kwargs)


def register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x.register_hook(hook)``. The hook receives a shard."""
    param, hook = args[0], args[1] if len(args) > 1 else kwargs["hook"]
    if not isinstance(param, ShardedParameter) or computes_in_layer(param.sharding):
        return on_local(func, args, kwargs)

    def with_shard(grad: Tensor) -> Tensor | None:
        result = hook(mark(grad.view_as(grad), param.sharding, GradientShard))
        return with_graph(result) if isinstance(result, Shard) else result

    return on_local(func, (param, with_shard), {})


def assign(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``x[index] = value`` for all elements or a mask of the full shape."""
    target, index = args[:2]
    is_whole = index is Ellipsis or (isinstance(index, slice) and index == slice(None))
    is_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.shape == target.shape
    if isinstance(target, WeightView) or not (is_whole or is_mask):
        return mixing(func, args, kwargs)
    return on_local(func, args, kwargs)


def cast_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle casts, moves, copies and detaching. The result of a weight is a weight."""
    result = elementwise(func, args, kwargs)
    if _is_weight(args[0]) and type(result) is Shard:
        result.is_weight = True
    return result


def view(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle views and selections of elements."""
    result, source = on_local(func, args, kwargs), args[0]
    if not isinstance(source, (Shard, WeightView)):
        return mixing(func, args, kwargs)
    if not _is_weight(source) and not _stays_marked(source):
        return result
    return tree_map_only(Tensor, partial(mark_view, given=[source]), result)


def _is_weight(value: Any) -> bool:
    """Return whether a tensor has weight values, so that products with it belong in its sharded layer."""
    if isinstance(value, WeightView):
        return not value.of_gradient
    return isinstance(value, ShardedParameter) or (isinstance(value, Shard) and value.is_weight)


def product(func: Any, args: Any, kwargs: Any) -> Any:
    weight = next((arg for arg in tree_leaves((args, kwargs)) if _is_weight(arg)), None)
    if weight is not None and not _computes_with_part(weight):
        raise RuntimeError(
            f"{name_of(func)} with a shard ({weight.sharding}) outside of its layer would give a part of the result: "
            + advice("call the layer itself, or pass weight.full_tensor(), a collective of the tensor-parallel group")
        )
    return mixing(func, args, kwargs)


def lookup(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``embedding(ids, weight)``. Tables with sharded features, such as biases per head, allow local lookup."""
    weight = next((arg for arg in (*args, *kwargs.values()) if _is_weight(arg)), None)
    if weight is not None and weight.sharding.layout.dim == 0:
        return product(func, args, kwargs)
    with without_override():
        return func(*args, **kwargs)


def _computes_with_part(weight: Any) -> bool:
    """Return whether a product with a shard is a step of its layer. Attention layers also split weights by heads."""
    if is_called_by_operation() or computes_in_owner(weight.sharding):
        return True
    return isinstance(weight, WeightView) and computes_in_layer(weight.sharding)


def chunk(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``chunk``. ``fully_shard`` splits parameters with it, even if it wraps only a block of the model.

    Raises:
        ValueError: ``fully_shard`` would split a shard over ranks with different shards.
    """
    if isinstance(args[0], ShardedParameter):
        require_replicas_in_fully_shard(args[0].sharding.name, args[0].sharding.mesh)
    return view(func, args, kwargs)


def size(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the full size for values of ``state_dict()`` and optimizer states: torch compares it with the saved size.

    ``shape`` and the size of a single dimension refer to the local tensor. The exception is ``torch.nn.init``, which
    computes the bounds of random numbers from the full sizes.
    """
    full = args[0].sharding.layout.shape if isinstance(args[0], Shard) else None
    if full is not None and len(args) == 2 and computes_initial_bounds():
        return full[args[1]]
    if full is not None and len(args) == 1 and not kwargs and type(args[0]) is Shard:
        return torch.Size(full)
    with without_override():
        return func(*args, **kwargs)


def device(func: Any, args: Any, kwargs: Any) -> Any:
    """Return ``x.device``. ``DistributedDataParallel`` reads it before it compares shapes and sends parameters."""
    if is_read_by_ddp():
        require_replicas_in_ddp(args[0].sharding)
    return on_local(func, args, kwargs)


def new_empty(func: Any, args: Any, kwargs: Any) -> Any:
    """Handle ``new_empty``: asynchronous saves of ``torch.distributed.checkpoint`` copy into it; see `Shard.set_`."""
    with without_override():
        result = func(*args, **kwargs)
    return mark(result, args[0].sharding, Shard) if type(args[0]) is Shard and not result.dim() else result
