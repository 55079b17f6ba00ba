"""Rules for elementwise torch functions on the shards of a `ShardedActivation`.

A rule returns ``NotImplemented`` if the result needs elements of other ranks. The function is then computed on full
tensors. Importing this module, `activation_shapes` and `activation_products` registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_models.layers.sharded_activation import RULES, Rule, ShardedActivation, ShardSpec


def functions(names: Iterable[str]) -> list[Any]:
    """Return torch's methods, operators and functions with these names."""
    found = []
    for name in names:
        owned = [getattr(owner, name, None) for owner in (torch, Tensor, F)]
        operators = [getattr(Tensor, f"__{prefix}{name}__", None) for prefix in ("", "r")]
        found += [function for function in (*owned, *operators) if callable(function)]
    return found


def _in_place(names: Iterable[str]) -> list[Any]:
    found = []
    for name in names:
        owned = [getattr(owner, f"{name}_", None) for owner in (torch, Tensor, F)]
        found += [each for each in (*owned, getattr(Tensor, f"__i{name}__", None)) if callable(each)]
    return found


def register(rule: Rule, functions: Iterable[Any]) -> None:
    RULES.update(dict.fromkeys(functions, rule))


def positive(x: Tensor, dim: int) -> int:
    return dim % x.dim() if x.dim() else 0


def aligned(like: ShardedActivation, x: Any, negative_dim: int) -> Any:
    """Return ``x`` as an operand for the local shard of ``like``.

    Args:
        negative_dim: the sharded dimension of ``like``, counted from the end.

    Returns:
        The local shard of ``x``, or the full ``x`` if it lacks the dimension. ``NotImplemented`` if sizes differ.
    """
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, ShardedActivation):
        same_dim = x.spec.dim - x.dim() == negative_dim
        if same_dim and (x.spec.units, x.spec.parts) == (like.spec.units, like.spec.parts):
            return x.local()
        if same_dim and x.observer is not None and x.spec.parts == like.spec.parts:
            common = gcd(x.spec.units, like.spec.units)
            x.observer.propose(x.sources, units=common)
            x.observer.propose(like.sources, units=common)
        x = x.full("an operand that is sharded otherwise")
    if x.dim() < -negative_dim or x.shape[negative_dim] == 1:
        return like.copy_of(x)
    if x.shape[negative_dim] != like.full_shape[like.spec.dim]:
        return NotImplemented
    return like.slice_of(x, x.dim() + negative_dim)


def elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs or any(isinstance(arg, (list, tuple, dict)) for arg in (*args, *kwargs.values())):
        return NotImplemented
    given = [*args, *kwargs.values()]
    if func is torch.where and len(given) < 3:
        return NotImplemented
    like = next(arg for arg in given if isinstance(arg, ShardedActivation))
    changes = func in _CHANGING or kwargs.get("inplace")
    if changes and args[0] is not like:
        return NotImplemented
    negative_dim = like.spec.dim - like.dim()
    operands = [like.local() if arg is like else aligned(like, arg, negative_dim) for arg in given]
    if any(operand is NotImplemented for operand in operands):
        return NotImplemented
    result = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if changes:
        return like
    spec = ShardSpec(result.dim() + negative_dim, like.spec.units, like.spec.parts)
    made = like.with_local(result, spec)
    for arg in given:
        if isinstance(arg, ShardedActivation):
            made.sources |= arg.sources
    return made


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute casts and similar functions. Further tensor arguments determine only the dtype."""
    if not isinstance(args[0], ShardedActivation):
        return func(*(arg.local() if isinstance(arg, ShardedActivation) else arg for arg in args), **kwargs)
    local = [arg.local() if isinstance(arg, ShardedActivation) else arg for arg in args]
    return args[0].with_local(func(*local, **kwargs))


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the dropout mask of the full tensor, so that all ranks draw the same numbers as one process."""
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    x = given["input"]
    if not isinstance(x, ShardedActivation) or given["inplace"]:
        return NotImplemented
    if not given["training"] or given["p"] == 0.0:
        return x
    local = x.local()
    mask = func(torch.ones(x.full_shape, dtype=local.dtype, device=local.device), given["p"], True)
    return x.with_local(local * x.slice_of(mask, x.spec.dim))


_UNARY = (
    *("relu", "gelu", "silu", "sigmoid", "tanh", "exp", "exp2", "expm1", "neg", "negative", "positive", "abs"),
    *("absolute", "sqrt", "rsqrt", "square", "reciprocal", "log", "log1p", "log2", "sin", "cos", "erf", "sign"),
    *("relu6", "hardtanh", "hardswish", "hardsigmoid", "elu", "selu", "celu", "leaky_relu", "softplus", "softsign"),
    *("mish", "logsigmoid", "clamp", "clip", "clamp_min", "clamp_max", "isnan", "isinf", "isfinite", "logical_not"),
    *("invert", "bitwise_not", "nan_to_num", "round", "floor", "ceil", "fill", "zero", "hardshrink", "softshrink"),
    *("tanhshrink", "threshold"),
)
_BINARY = (
    *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "truediv", "true_divide", "pow", "float_power"),
    *("maximum", "minimum", "fmin", "fmax", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "eq", "ne", "lt"),
    *("le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "and", "or", "xor", "remainder", "fmod", "mod"),
    *("atan2", "floor_divide", "floordiv", "copy"),
)
_CASTS = (
    *("float", "double", "half", "bfloat16", "to", "type", "type_as", "contiguous", "clone", "detach", "long"),
    *("int", "bool"),
)
_CHANGING = set(_in_place([*_UNARY, *_BINARY]))
register(elementwise, [*functions([*_UNARY, *_BINARY]), *_CHANGING])
register(_cast, functions(_CASTS))
register(_dropout, [F.dropout])
