"""Rules for reductions, normalisations and products of a `ShardedActivation`."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.layers.activation_rules import aligned, elementwise, functions, positive, register
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute reductions, softmax and similar functions along unsharded dimensions."""
    x = args[0] if args else None
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, ShardedActivation) or "out" in kwargs:
        return NotImplemented
    if isinstance(dims, Tensor):
        return elementwise(func, args, kwargs)  # max(x, y)
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or any(isinstance(dim, bool) for dim in dims):
        return NotImplemented
    dims = {positive(x, dim) for dim in dims}
    if x.spec.dim in dims or any(isinstance(arg, Tensor) for arg in (*args[2:], *kwargs.values())):
        return NotImplemented
    result = func(x.local(), *args[1:], **kwargs)
    if isinstance(result, tuple):
        return type(result)([_reduced(x, each, dims) for each in result])
    return _reduced(x, result, dims)


def _reduced(x: ShardedActivation, result: Tensor, dims: set[int]) -> ShardedActivation:
    gone = 0 if result.dim() == x.dim() else sum(dim < x.spec.dim for dim in dims)
    return x.with_local(result, ShardSpec(x.spec.dim - gone, x.spec.units, x.spec.parts))


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``layer_norm`` and ``rms_norm`` over dimensions behind the sharded dimension."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")[: 5 if func is F.layer_norm else 3]
    names = names if func is F.layer_norm else (*names, "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.pop("input")
    if not isinstance(x, ShardedActivation) or x.spec.dim >= x.dim() - len(given["normalized_shape"]):
        return NotImplemented
    if any(isinstance(value, ShardedActivation) for value in given.values()):
        return NotImplemented
    own = {key: x.copy_of(value) if isinstance(value, Tensor) else value for key, value in given.items()}
    return x.with_local(func(x.local(), **own))


_DIMS = (
    *("sum", "mean", "amax", "amin", "prod", "logsumexp", "var", "std", "max", "min", "argmax", "argmin"),
    *("cumsum", "softmax", "log_softmax", "sort", "all", "any"),
)
register(_along, functions(_DIMS))
register(_norm, [F.layer_norm, F.rms_norm])


# Products -------------------------------------------------------------------------------------------------------------


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or min(arg.dim() for arg in args) < 2:
        return NotImplemented
    a, b = args
    batched = [x for x in args if isinstance(x, ShardedActivation) and x.spec.dim - x.dim() <= -3]
    if batched:
        return _batched(func, batched[0], (a, b))
    if isinstance(a, ShardedActivation) and a.spec.dim == a.dim() - 2 and not isinstance(b, ShardedActivation):
        result, like, end = func(a.local(), a.copy_of(b)), a, 2
    elif isinstance(b, ShardedActivation) and b.spec.dim == b.dim() - 1 and not isinstance(a, ShardedActivation):
        result, like, end = func(b.copy_of(a), b.local()), b, 1
    else:
        return NotImplemented
    return like.with_local(result, ShardSpec(result.dim() - end, like.spec.units, like.spec.parts))


def _batched(func: Any, like: ShardedActivation, operands: Sequence[Any], **options: Any) -> Any:
    """Compute a function of batched matrices. A batch dimension (heads) is sharded as in ``like``."""
    negative_dim = like.spec.dim - like.dim()
    local = [aligned(like, x, negative_dim) for x in operands]
    if any(x is NotImplemented for x in local):
        return NotImplemented
    result = func(*local, **options)
    made = like.with_local(result, ShardSpec(result.dim() + negative_dim, like.spec.units, like.spec.parts))
    for x in operands:
        if isinstance(x, ShardedActivation):
            made.sources |= x.sources
    return made


def _baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or "out" in kwargs:
        return NotImplemented
    batched = [x for x in args if isinstance(x, ShardedActivation) and x.spec.dim - x.dim() == -3]
    return _batched(func, batched[0], args, **kwargs) if batched else NotImplemented


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = (given.pop(name, None) for name in names[:4])
    if not isinstance(query, ShardedActivation) or query.dim() != 4 or query.spec.dim != 1:
        return NotImplemented
    heads = query.full_shape[1]
    for other in (key, value):
        if other.shape[1] != heads and not (
            isinstance(other, ShardedActivation) and other.spec == query.spec and given.get("enable_gqa")
        ):
            if query.observer is not None and isinstance(other, ShardedActivation):
                query.observer.propose(query.sources, units=gcd(query.spec.units, other.spec.units))
                query.observer.propose(other.sources, units=gcd(query.spec.units, other.spec.units))
            return NotImplemented
    if not given.get("dropout_p"):
        return _batched(func, query, (query, key, value, mask), **given)
    stream = ShardedRngStream(query.tp, query.local().device)
    if query.tp.size > 1:
        stream.enter()
    try:
        return _batched(func, query, (query, key, value, mask), **given)
    finally:
        stream.leave()


register(_matmul, [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm])
register(_baddbmm, [torch.baddbmm, Tensor.baddbmm])
register(_attention, [F.scaled_dot_product_attention])
