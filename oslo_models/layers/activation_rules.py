"""The torch functions that are computed on the shards of a `ShardedActivation`.

A rule returns ``NotImplemented`` where the result would need elements of other ranks; the function is then computed on
full tensors. Importing this module registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_models.distributed.rng import ShardedRngStream
from oslo_models.layers.sharded_activation import RULES, Mark, Rule, ShardedActivation


def _functions(names: Iterable[str]) -> list[Any]:
    """The functions of torch with these names: methods, operators and functions."""
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


def _register(rule: Rule, functions: Iterable[Any]) -> None:
    RULES.update(dict.fromkeys(functions, rule))


def _dim(x: Tensor, dim: int) -> int:
    return dim % x.dim() if x.dim() else 0


def _aligned(like: ShardedActivation, x: Any, negative_dim: int) -> Any:
    """``x`` as an operand for the shard of ``like``, whose sharded dimension is ``negative_dim`` from the end.

    Returns:
        The shard of ``x``, or all of it where it has no such dimension; ``NotImplemented`` if sizes differ.
    """
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, ShardedActivation):
        same_dim = x.mark.dim - x.dim() == negative_dim
        if same_dim and (x.mark.units, x.mark.parts) == (like.mark.units, like.mark.parts):
            return x.local()
        if same_dim and x.observer is not None and x.mark.parts == like.mark.parts:
            common = gcd(x.mark.units, like.mark.units)
            x.observer.propose(x.sources, units=common)
            x.observer.propose(like.sources, units=common)
        x = x.full("an operand that is sharded otherwise")
    if x.dim() < -negative_dim or x.shape[negative_dim] == 1:
        return like.copy_of(x)
    if x.shape[negative_dim] != like.full_shape[like.mark.dim]:
        return NotImplemented
    return like.slice_of(x, x.dim() + negative_dim)


# Element by element ---------------------------------------------------------------------------------------------------


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "out" in kwargs or any(isinstance(arg, (list, tuple, dict)) for arg in (*args, *kwargs.values())):
        return NotImplemented
    given = [*args, *kwargs.values()]
    if func is torch.where and len(given) < 3:
        return NotImplemented
    like = next(arg for arg in given if isinstance(arg, ShardedActivation))
    changes = func in _CHANGING or kwargs.get("inplace")
    if changes and args[0] is not like:
        return NotImplemented
    negative_dim = like.mark.dim - like.dim()
    operands = [like.local() if arg is like else _aligned(like, arg, negative_dim) for arg in given]
    if any(operand is NotImplemented for operand in operands):
        return NotImplemented
    result = func(*operands[: len(args)], **dict(zip(kwargs, operands[len(args) :], strict=True)))
    if changes:
        return like
    mark = Mark(result.dim() + negative_dim, like.mark.units, like.mark.parts)
    made = like.with_local(result, mark)
    for arg in given:
        if isinstance(arg, ShardedActivation):
            made.sources |= arg.sources
    return made


def _cast(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Casts, and others of which further tensors give the type only."""
    if not isinstance(args[0], ShardedActivation):
        return func(*(arg.local() if isinstance(arg, ShardedActivation) else arg for arg in args), **kwargs)
    local = [arg.local() if isinstance(arg, ShardedActivation) else arg for arg in args]
    return args[0].with_local(func(*local, **kwargs))


def _dropout(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The mask is that of the full tensor, so that all ranks draw the same numbers as one process."""
    names = ("input", "p", "training", "inplace")
    given = {"p": 0.5, "training": True, "inplace": False, **dict(zip(names, args, strict=False)), **kwargs}
    x = given["input"]
    if not isinstance(x, ShardedActivation) or given["inplace"]:
        return NotImplemented
    if not given["training"] or given["p"] == 0.0:
        return x
    local = x.local()
    mask = func(torch.ones(x.full_shape, dtype=local.dtype, device=local.device), given["p"], True)
    return x.with_local(local * x.slice_of(mask, x.mark.dim))


_UNARY = """relu gelu silu sigmoid tanh exp exp2 expm1 neg negative positive abs absolute sqrt rsqrt square reciprocal log
log1p log2 sin cos erf sign relu6 hardtanh hardswish hardsigmoid elu selu celu leaky_relu softplus softsign mish
logsigmoid clamp clip clamp_min clamp_max isnan isinf isfinite logical_not invert bitwise_not nan_to_num round floor ceil
fill zero hardshrink softshrink tanhshrink threshold""".split()
_BINARY = """add sub subtract mul multiply div divide truediv true_divide pow float_power maximum minimum fmin fmax where
masked_fill lerp addcmul addcdiv eq ne lt le gt ge logical_and logical_or logical_xor and or xor remainder fmod mod atan2
floor_divide floordiv copy""".split()
_CASTS = "float double half bfloat16 to type type_as contiguous clone detach long int bool".split()
_CHANGING = set(_in_place([*_UNARY, *_BINARY]))
_register(_elementwise, [*_functions([*_UNARY, *_BINARY]), *_CHANGING])
_register(_cast, _functions(_CASTS))
_register(_dropout, [F.dropout])


# Shapes ---------------------------------------------------------------------------------------------------------------


def _shape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Size:
    return args[0].full_shape


def _size(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    return args[0].full_shape if dim is None else args[0].full_shape[dim]


def _numel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return prod(args[0].full_shape)


def _len(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return args[0].full_shape[0]


def _integers(values: Sequence[Any]) -> list[int] | None:
    """The integers among the arguments of a call, given one by one or as a sequence."""
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        values = values[0]
    if not values or not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        return None
    return list(values)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sizes = _integers([*args[1:], *kwargs.values()])
    return NotImplemented if sizes is None else _reshaped(args[0], sizes)


def _flatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, given = args[0], {**dict(zip(("start_dim", "end_dim"), args[1:], strict=False)), **kwargs}
    start, end = _dim(x, given.get("start_dim", 0)), _dim(x, given.get("end_dim", -1))
    shape = list(x.full_shape)
    return _reshaped(x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "dim", "sizes"), args, strict=False)), **kwargs}
    x, shape = given["input"], list(given["input"].full_shape)
    dim, sizes = _dim(x, given["dim"]), list(given["sizes"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = -shape[dim] // prod(sizes) if prod(sizes) else 0
    return _reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    dim %= x.dim() + 1
    return _reshaped(x, [*x.full_shape[:dim], 1, *x.full_shape[dim:]])


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    chosen = range(x.dim()) if dims is None else [_dim(x, dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    return _reshaped(x, [size for dim, size in enumerate(x.full_shape) if size != 1 or dim not in chosen])


def _reshaped(x: ShardedActivation, sizes: list[int]) -> Any:
    """``x.reshape(sizes)``; elements stay in their order, so the sharded dimension is found by products of sizes."""
    shape, mark = list(x.full_shape), x.mark
    if prod(shape) == 0:
        return NotImplemented
    if -1 in sizes:
        sizes = [-prod(shape) // prod(sizes) if size == -1 else size for size in sizes]
    if prod(sizes) != prod(shape):
        return NotImplemented  # torch raises its error
    old, new = next(group for group in _groups(shape, sizes) if mark.dim in group[0])
    parts = prod(shape[old.start : mark.dim]) * mark.parts
    inner = prod(shape[mark.dim : old.stop]) // mark.parts
    before, dim = 1, new.start
    while dim < new.stop - 1 and before * sizes[dim] <= parts and parts % (before * sizes[dim]) == 0:
        if before == parts and sizes[dim] > 1:
            break
        before *= sizes[dim]
        dim += 1
    if parts % before or sizes[dim] % (parts // before):
        return NotImplemented
    parts //= before
    slots = sizes[dim] // parts
    if slots % mark.units:
        if x.observer is not None:
            x.observer.propose(x.sources, units=gcd(slots, mark.units))
        return NotImplemented
    local = x.local()
    own = local.shape[mark.dim] // mark.parts * (inner // (shape[mark.dim] // mark.parts))
    target = [*sizes[:dim], parts * (slots * own // inner), *sizes[dim + 1 :]]
    return x.with_local(local.reshape(target), Mark(dim, mark.units, parts), sizes[dim])


def _groups(old: list[int], new: list[int]) -> Iterable[tuple[range, range]]:
    """The smallest groups of neighbouring dimensions of two shapes that hold the same elements."""
    a = c = 0
    while a < len(old) or c < len(new):
        b, d = min(a + 1, len(old)), min(c + 1, len(new))
        while prod(old[a:b]) != prod(new[c:d]):
            if prod(old[a:b]) < prod(new[c:d]):
                b += 1
            else:
                d += 1
        yield range(a, b), range(c, d)
        a, c = b, d


def _moved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``transpose``, ``permute`` and others: torch says where the dimensions go, of a tensor without memory."""
    x = args[0]
    numbered = torch.empty([2 + dim for dim in range(x.dim())], device="meta")
    order = [size - 2 for size in func(numbered, *args[1:], **kwargs).shape]
    mark = Mark(order.index(x.mark.dim), x.mark.units, x.mark.parts)
    return x.with_local(func(x.local(), *args[1:], **kwargs), mark)


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, sizes = args[0], _integers([*args[1:], *kwargs.values()])
    if sizes is None:
        return NotImplemented
    dim = len(sizes) - x.dim() + x.mark.dim
    sizes[dim] = -1
    return x.with_local(x.local().expand(sizes), Mark(dim, x.mark.units, x.mark.parts))


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, counts = args[0], _integers([*args[1:], *kwargs.values()])
    if counts is None:
        return NotImplemented
    dim = len(counts) - x.dim() + x.mark.dim
    if counts[dim] != 1:
        return NotImplemented
    return x.with_local(x.local().repeat(counts), Mark(dim, x.mark.units, x.mark.parts))


def _repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "repeats", "dim"), args, strict=False)), **kwargs}
    x, repeats, dim = given["input"], given["repeats"], given.get("dim")
    if not isinstance(x, ShardedActivation) or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    full = x.full_shape[x.mark.dim] * (repeats if _dim(x, dim) == x.mark.dim else 1)
    return x.with_local(x.local().repeat_interleave(repeats, dim), None, full)


_register(_shape, [Tensor.shape.__get__])  # type: ignore[attr-defined]
_register(_size, [Tensor.size])
_register(_numel, [Tensor.numel, torch.numel, Tensor.nelement])
_register(_len, [Tensor.__len__])
_register(_view, [Tensor.view, Tensor.reshape, torch.reshape])
_register(_flatten, [Tensor.flatten, torch.flatten])
_register(_unflatten, [Tensor.unflatten, torch.unflatten])
_register(_unsqueeze, [Tensor.unsqueeze, torch.unsqueeze])
_register(_squeeze, [Tensor.squeeze, torch.squeeze])
_register(_moved, _functions(["transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t"]))
_register(_moved, [Tensor.T.__get__, Tensor.mT.__get__])  # type: ignore[attr-defined]
_register(_expand, [Tensor.expand])
_register(_repeat, [Tensor.repeat])
_register(_repeat_interleave, [Tensor.repeat_interleave, torch.repeat_interleave])


# Pieces ---------------------------------------------------------------------------------------------------------------


def _piece(x: ShardedActivation, start: int, stop: int) -> Any:
    """``x.narrow`` along the sharded dimension: whole parts stay sharded."""
    size = x.full_shape[x.mark.dim]
    inner, local_inner = size // x.mark.parts, x.local().shape[x.mark.dim] // x.mark.parts
    if (start, stop) == (0, size):
        return x
    if start % inner or stop % inner or start >= stop:
        count = size // max(stop - start, 1)
        if x.observer is not None and x.mark.parts == 1 and count * (stop - start) == size:
            x.observer.propose(x.sources, parts=count)
        return NotImplemented
    first, parts = start // inner, (stop - start) // inner
    local = x.local().narrow(x.mark.dim, first * local_inner, parts * local_inner)
    return x.with_local(local, Mark(x.mark.dim, x.mark.units, parts), stop - start)


def _chunks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``chunk`` and ``split``."""
    x = args[0]
    dim = _dim(x, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    if dim != x.mark.dim:
        return tuple(x.with_local(piece) for piece in func(x.local(), *args[1:], **kwargs))
    numbers = torch.empty(x.full_shape[dim], device="meta")
    given = {key: value for key, value in kwargs.items() if key != "dim"}
    pieces, start = [], 0
    for size in [len(piece) for piece in func(numbers, *args[1:2], **given)]:
        pieces.append(_piece(x, start, start + size))
        start += size
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else tuple(pieces)


def _unbind(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x = args[0]
    dim = _dim(x, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    pieces = [_without(x, dim, index) for index in range(x.full_shape[dim])]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else tuple(pieces)


def _without(x: ShardedActivation, dim: int, index: int) -> Any:
    """``x.select(dim, index)``."""
    if dim == x.mark.dim:
        if x.observer is not None and x.mark.parts == 1:
            x.observer.propose(x.sources, parts=x.full_shape[dim])
        return NotImplemented
    mark = Mark(x.mark.dim - (dim < x.mark.dim), x.mark.units, x.mark.parts)
    return x.with_local(x.local().select(dim, index), mark)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, index = args if len(args) == 3 else (args[0], kwargs["dim"], kwargs["index"])
    return _without(x, _dim(x, dim), index) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, start, length = args if len(args) == 4 else (args[0], *(kwargs.get(k) for k in ("dim", "start", "length")))
    if not all(isinstance(value, int) for value in (dim, start, length)):
        return NotImplemented
    if _dim(x, dim) == x.mark.dim:
        return _piece(x, start, start + length)
    return x.with_local(x.local().narrow(dim, start, length))


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Indices that are integers, slices, ``None`` and ``...``."""
    x, index = args
    if not isinstance(x, ShardedActivation):
        return NotImplemented
    index = list(index) if isinstance(index, tuple) else [index]
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index):
        return NotImplemented
    used = sum(each is not None and each is not Ellipsis for each in index)
    if Ellipsis not in index:
        index.append(Ellipsis)
    place = index.index(Ellipsis)
    index[place : place + 1] = [slice(None)] * (x.dim() - used)
    dim, new_dim = 0, 0
    for position, each in enumerate(index):
        if each is not None and dim == x.mark.dim:
            if isinstance(each, int):
                return _without(x, dim, each)
            start, stop, step = each.indices(x.full_shape[dim])
            x = NotImplemented if step != 1 else _piece(x, start, stop)
            if x is NotImplemented:
                return NotImplemented
            index[position] = slice(None)
            break
        dim += each is not None
        new_dim += not isinstance(each, int)
    mark = Mark(new_dim, x.mark.units, x.mark.parts)
    return x.with_local(x.local()[tuple(index)], mark)


def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    x = given["input"]
    if not isinstance(x, ShardedActivation) or _dim(x, given["dim"]) == x.mark.dim:
        return NotImplemented
    return x.with_local(x.local().index_select(given["dim"], given["index"]))


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cat`` along another dimension; caches begin as empty tensors of one dimension, which torch ignores."""
    pieces, dim = list(args[0] if args else kwargs["tensors"]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if "out" in kwargs:
        return NotImplemented
    like = next(piece for piece in pieces if isinstance(piece, ShardedActivation))
    pieces = [piece for piece in pieces if piece.shape != (0,)]
    if _dim(like, dim) == like.mark.dim or any(piece.dim() != like.dim() for piece in pieces):
        return NotImplemented
    local = [_aligned(like, piece, like.mark.dim - like.dim()) for piece in pieces]
    if any(piece is NotImplemented for piece in local) or len({piece.shape[like.mark.dim] for piece in local}) > 1:
        return NotImplemented
    made = like.with_local(torch.cat(local, dim))
    for piece in pieces:
        if isinstance(piece, ShardedActivation):
            made.sources |= piece.sources
    return made


_register(_chunks, _functions(["chunk", "split"]))
_register(_unbind, _functions(["unbind"]))
_register(_select, _functions(["select"]))
_register(_narrow, _functions(["narrow"]))
_register(_getitem, [Tensor.__getitem__])
_register(_index_select, _functions(["index_select"]))
_register(_cat, [torch.cat, torch.concat])


# Along other dimensions -----------------------------------------------------------------------------------------------


def _along(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Reductions, softmax and others along given dimensions, none of which is sharded."""
    x = args[0] if args else None
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, ShardedActivation) or "out" in kwargs:
        return NotImplemented
    if isinstance(dims, Tensor):
        return _elementwise(func, args, kwargs)  # max(x, y)
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, (list, tuple)) or any(isinstance(dim, bool) for dim in dims):
        return NotImplemented
    dims = {_dim(x, dim) for dim in dims}
    if x.mark.dim in dims or any(isinstance(arg, Tensor) for arg in (*args[2:], *kwargs.values())):
        return NotImplemented
    result = func(x.local(), *args[1:], **kwargs)
    if isinstance(result, tuple):
        return type(result)([_reduced(x, each, dims) for each in result])  # type: ignore[call-arg]
    return _reduced(x, result, dims)


def _reduced(x: ShardedActivation, result: Tensor, dims: set[int]) -> ShardedActivation:
    gone = 0 if result.dim() == x.dim() else sum(dim < x.mark.dim for dim in dims)
    return x.with_local(result, Mark(x.mark.dim - gone, x.mark.units, x.mark.parts))


def _norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``layer_norm`` and ``rms_norm`` over dimensions behind the sharded one."""
    names = ("input", "normalized_shape", "weight", "bias", "eps")[: 5 if func is F.layer_norm else 3]
    names = names if func is F.layer_norm else (*names, "eps")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    x = given.pop("input")
    if not isinstance(x, ShardedActivation) or x.mark.dim >= x.dim() - len(given["normalized_shape"]):
        return NotImplemented
    if any(isinstance(value, ShardedActivation) for value in given.values()):
        return NotImplemented
    own = {key: x.copy_of(value) if isinstance(value, Tensor) else value for key, value in given.items()}
    return x.with_local(func(x.local(), **own))


_DIMS = "sum mean amax amin prod logsumexp var std max min argmax argmin cumsum softmax log_softmax sort all any"
_register(_along, _functions(_DIMS.split()))
_register(_norm, [F.layer_norm, F.rms_norm])


# Products -------------------------------------------------------------------------------------------------------------


def _matmul(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 2 or kwargs or min(arg.dim() for arg in args) < 2:
        return NotImplemented
    a, b = args
    batched = [x for x in args if isinstance(x, ShardedActivation) and x.mark.dim - x.dim() <= -3]
    if batched:
        return _batched(func, batched[0], (a, b))
    if isinstance(a, ShardedActivation) and a.mark.dim == a.dim() - 2 and not isinstance(b, ShardedActivation):
        result, like, end = func(a.local(), a.copy_of(b)), a, 2
    elif isinstance(b, ShardedActivation) and b.mark.dim == b.dim() - 1 and not isinstance(a, ShardedActivation):
        result, like, end = func(b.copy_of(a), b.local()), b, 1
    else:
        return NotImplemented
    return like.with_local(result, Mark(result.dim() - end, like.mark.units, like.mark.parts))


def _batched(func: Any, like: ShardedActivation, operands: Sequence[Any], **options: Any) -> Any:
    """A function of matrices, of which a dimension that counts matrices (heads) is sharded as in ``like``."""
    negative_dim = like.mark.dim - like.dim()
    local = [_aligned(like, x, negative_dim) for x in operands]
    if any(x is NotImplemented for x in local):
        return NotImplemented
    result = func(*local, **options)
    made = like.with_local(result, Mark(result.dim() + negative_dim, like.mark.units, like.mark.parts))
    for x in operands:
        if isinstance(x, ShardedActivation):
            made.sources |= x.sources
    return made


def _baddbmm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) != 3 or "out" in kwargs:
        return NotImplemented
    batched = [x for x in args if isinstance(x, ShardedActivation) and x.mark.dim - x.dim() == -3]
    return _batched(func, batched[0], args, **kwargs) if batched else NotImplemented


def _attention(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, value, mask = (given.pop(name, None) for name in names[:4])
    if not isinstance(query, ShardedActivation) or query.dim() != 4 or query.mark.dim != 1:
        return NotImplemented
    heads = query.full_shape[1]
    for other in (key, value):
        if other.shape[1] != heads and not (
            isinstance(other, ShardedActivation) and other.mark == query.mark and given.get("enable_gqa")
        ):
            if query.observer is not None and isinstance(other, ShardedActivation):
                query.observer.propose(query.sources, units=gcd(query.mark.units, other.mark.units))
                query.observer.propose(other.sources, units=gcd(query.mark.units, other.mark.units))
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


_register(_matmul, [torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm])
_register(_baddbmm, [torch.baddbmm, Tensor.baddbmm])
_register(_attention, [F.scaled_dot_product_attention])
