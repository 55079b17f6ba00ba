"""Rules for functions that reshape or slice a `ShardedActivation`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from oslo_models.layers.activation_rules import aligned, functions, positive, register
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec


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
    """Return the integer arguments of a call, passed separately or as a sequence. ``None`` for other arguments."""
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
    start, end = positive(x, given.get("start_dim", 0)), positive(x, given.get("end_dim", -1))
    shape = list(x.full_shape)
    return _reshaped(x, [*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]])


def _unflatten(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "dim", "sizes"), args, strict=False)), **kwargs}
    x, shape = given["input"], list(given["input"].full_shape)
    dim, sizes = positive(x, given["dim"]), list(given["sizes"])
    if -1 in sizes:
        sizes[sizes.index(-1)] = -shape[dim] // prod(sizes) if prod(sizes) else 0
    return _reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _unsqueeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim = args[0], args[1] if len(args) > 1 else kwargs["dim"]
    dim %= x.dim() + 1
    return _reshaped(x, [*x.full_shape[:dim], 1, *x.full_shape[dim:]])


def _squeeze(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dims = args[0], args[1] if len(args) > 1 else kwargs.get("dim")
    chosen = (
        range(x.dim()) if dims is None else [positive(x, dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    )
    return _reshaped(x, [size for dim, size in enumerate(x.full_shape) if size != 1 or dim not in chosen])


def _reshaped(x: ShardedActivation, sizes: list[int]) -> Any:
    """Compute ``x.reshape(sizes)``. Elements keep their order, so products of sizes locate the sharded dimension."""
    shape, spec = list(x.full_shape), x.spec
    if prod(shape) == 0:
        return NotImplemented
    if -1 in sizes:
        sizes = [-prod(shape) // prod(sizes) if size == -1 else size for size in sizes]
    if prod(sizes) != prod(shape):
        return NotImplemented  # torch raises its error
    old, new = next(group for group in _groups(shape, sizes) if spec.dim in group[0])
    if not new:
        return NotImplemented
    parts = prod(shape[old.start : spec.dim]) * spec.parts
    inner = prod(shape[spec.dim : old.stop]) // spec.parts
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
    if slots % spec.units:
        if x.observer is not None:
            x.observer.propose(x.sources, units=gcd(slots, spec.units))
        return NotImplemented
    local = x.local()
    own = local.shape[spec.dim] // spec.parts * (inner // (shape[spec.dim] // spec.parts))
    target = [*sizes[:dim], parts * (slots * own // inner), *sizes[dim + 1 :]]
    return x.with_local(local.reshape(target), ShardSpec(dim, spec.units, parts), sizes[dim])


def _groups(old: list[int], new: list[int]) -> Iterable[tuple[range, range]]:
    """Yield the smallest groups of adjacent dimensions with equal element counts in both shapes."""
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
    """Compute ``transpose``, ``permute`` and similar functions. A meta tensor reveals the new order of dimensions."""
    x = args[0]
    numbered = torch.empty([2 + dim for dim in range(x.dim())], device="meta")
    order = [size - 2 for size in func(numbered, *args[1:], **kwargs).shape]
    spec = ShardSpec(order.index(x.spec.dim), x.spec.units, x.spec.parts)
    return x.with_local(func(x.local(), *args[1:], **kwargs), spec)


def _expand(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, sizes = args[0], _integers([*args[1:], *kwargs.values()])
    if sizes is None:
        return NotImplemented
    dim = len(sizes) - x.dim() + x.spec.dim
    sizes[dim] = -1
    return x.with_local(x.local().expand(sizes), ShardSpec(dim, x.spec.units, x.spec.parts))


def _repeat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, counts = args[0], _integers([*args[1:], *kwargs.values()])
    if counts is None:
        return NotImplemented
    dim = len(counts) - x.dim() + x.spec.dim
    if counts[dim] != 1:
        return NotImplemented
    return x.with_local(x.local().repeat(counts), ShardSpec(dim, x.spec.units, x.spec.parts))


def _repeat_interleave(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "repeats", "dim"), args, strict=False)), **kwargs}
    x, repeats, dim = given["input"], given["repeats"], given.get("dim")
    if not isinstance(x, ShardedActivation) or not isinstance(repeats, int) or dim is None:
        return NotImplemented
    full = x.full_shape[x.spec.dim] * (repeats if positive(x, dim) == x.spec.dim else 1)
    return x.with_local(x.local().repeat_interleave(repeats, dim), None, full)


register(_shape, [Tensor.shape.__get__])  # type: ignore[attr-defined]
register(_size, [Tensor.size])
register(_numel, [Tensor.numel, torch.numel, Tensor.nelement])
register(_len, [Tensor.__len__])
register(_view, [Tensor.view, Tensor.reshape, torch.reshape])
register(_flatten, [Tensor.flatten, torch.flatten])
register(_unflatten, [Tensor.unflatten, torch.unflatten])
register(_unsqueeze, [Tensor.unsqueeze, torch.unsqueeze])
register(_squeeze, [Tensor.squeeze, torch.squeeze])
register(_moved, functions(["transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis", "t"]))
register(_moved, [Tensor.T.__get__, Tensor.mT.__get__])  # type: ignore[attr-defined]
register(_expand, [Tensor.expand])
register(_repeat, [Tensor.repeat])
register(_repeat_interleave, [Tensor.repeat_interleave, torch.repeat_interleave])


# Pieces ---------------------------------------------------------------------------------------------------------------


def _piece(x: ShardedActivation, start: int, stop: int) -> Any:
    """Compute ``x.narrow`` along the sharded dimension. Whole parts stay sharded."""
    size = x.full_shape[x.spec.dim]
    inner, local_inner = size // x.spec.parts, x.local().shape[x.spec.dim] // x.spec.parts
    if (start, stop) == (0, size):
        return x
    if start % inner or stop % inner or start >= stop:
        count = size // max(stop - start, 1)
        if x.observer is not None and x.spec.parts == 1 and count * (stop - start) == size:
            x.observer.propose(x.sources, parts=count)
        return NotImplemented
    first, parts = start // inner, (stop - start) // inner
    local = x.local().narrow(x.spec.dim, first * local_inner, parts * local_inner)
    return x.with_local(local, ShardSpec(x.spec.dim, x.spec.units, parts), stop - start)


def _chunks(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute ``chunk`` and ``split``."""
    x = args[0]
    dim = positive(x, args[2] if len(args) > 2 else kwargs.get("dim", 0))
    if dim != x.spec.dim:
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
    dim = positive(x, args[1] if len(args) > 1 else kwargs.get("dim", 0))
    pieces = [_without(x, dim, index) for index in range(x.full_shape[dim])]
    return NotImplemented if any(piece is NotImplemented for piece in pieces) else tuple(pieces)


def _without(x: ShardedActivation, dim: int, index: int) -> Any:
    """Compute ``x.select(dim, index)``."""
    if dim == x.spec.dim:
        if x.observer is not None and x.spec.parts == 1:
            x.observer.propose(x.sources, parts=x.full_shape[dim])
        return NotImplemented
    spec = ShardSpec(x.spec.dim - (dim < x.spec.dim), x.spec.units, x.spec.parts)
    return x.with_local(x.local().select(dim, index), spec)


def _select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, index = args if len(args) == 3 else (args[0], kwargs["dim"], kwargs["index"])
    return _without(x, positive(x, dim), index) if isinstance(index, int) else NotImplemented


def _narrow(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, dim, start, length = args if len(args) == 4 else (args[0], *(kwargs.get(k) for k in ("dim", "start", "length")))
    if not all(isinstance(value, int) for value in (dim, start, length)):
        return NotImplemented
    if positive(x, dim) == x.spec.dim:
        return _piece(x, start, start + length)
    return x.with_local(x.local().narrow(dim, start, length))


def _getitem(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Index with integers, slices, ``None`` and ``...``."""
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
        if each is not None and dim == x.spec.dim:
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
    spec = ShardSpec(new_dim, x.spec.units, x.spec.parts)
    return x.with_local(x.local()[tuple(index)], spec)


def _index_select(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = {**dict(zip(("input", "dim", "index"), args, strict=False)), **kwargs}
    x = given["input"]
    if not isinstance(x, ShardedActivation) or positive(x, given["dim"]) == x.spec.dim:
        return NotImplemented
    return x.with_local(x.local().index_select(given["dim"], given["index"]))


def _cat(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Concatenate along an unsharded dimension. Ignore empty one-dimensional tensors (new caches), as torch does."""
    pieces, dim = list(args[0] if args else kwargs["tensors"]), args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if "out" in kwargs:
        return NotImplemented
    like = next(piece for piece in pieces if isinstance(piece, ShardedActivation))
    pieces = [piece for piece in pieces if piece.shape != (0,)]
    if positive(like, dim) == like.spec.dim or any(piece.dim() != like.dim() for piece in pieces):
        return NotImplemented
    local = [aligned(like, piece, like.spec.dim - like.dim()) for piece in pieces]
    if any(piece is NotImplemented for piece in local) or len({piece.shape[like.spec.dim] for piece in local}) > 1:
        return NotImplemented
    made = like.with_local(torch.cat(local, dim))
    for piece in pieces:
        if isinstance(piece, ShardedActivation):
            made.sources |= piece.sources
    return made


register(_chunks, functions(["chunk", "split"]))
register(_unbind, functions(["unbind"]))
register(_select, functions(["select"]))
register(_narrow, functions(["narrow"]))
register(_getitem, [Tensor.__getitem__])
register(_index_select, functions(["index_select"]))
register(_cat, [torch.cat, torch.concat])
