"""tensor_parallel's state actions: pure functions from a full tensor and a rank to the local shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from oslo_models.sharding.layout import Layout


class StateAction:
    """Base class of actions. A subclass computes the local shard with torch functions."""

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the shard of a rank."""
        raise TypeError(f"{type(self).__name__} has no __call__(self, tensor, rank)")


class Split(StateAction):
    """Equal shards along a dimension. The first ranks get one more element if the ranks do not divide the size."""

    def __init__(self, world_size: int, dim: int) -> None:
        self.world_size, self.dim = world_size, dim

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{key}={value}' for key, value in vars(self).items())})"

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor.tensor_split(self.world_size, dim=self.dim)[rank]


class SplitInChunks(Split):
    """Split like `Split`, but keep chunks of ``chunk_size`` elements, such as attention heads, whole."""

    def __init__(self, world_size: int, dim: int, chunk_size: int, optional: bool = False) -> None:
        super().__init__(world_size, dim)
        self.chunk_size, self.optional = chunk_size, optional

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return _chunks_of(tensor, self.dim, 1, self.chunk_size, self, rank)


class SplitInGroupedChunks(Split):
    """Split ``num_groups`` concatenated matrices (query, key and value), each like `SplitInChunks`."""

    def __init__(self, world_size: int, dim: int, num_groups: int, chunk_size: int) -> None:
        super().__init__(world_size, dim)
        self.num_groups, self.chunk_size = num_groups, chunk_size

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return _chunks_of(tensor, self.dim, self.num_groups, self.chunk_size, self, rank)


def _chunks_of(tensor: Tensor, dim: int, groups: int, chunk: int, action: Split, rank: int) -> Tensor:
    dim, size = dim % tensor.dim(), tensor.shape[dim]
    if size % (groups * chunk):
        raise ValueError(f"{action} does not divide dimension {dim} of a tensor with the shape {list(tensor.shape)}")
    apart = tensor.unflatten(dim, (groups, size // groups // chunk, chunk))
    return apart.tensor_split(action.world_size, dim=dim + 1)[rank].flatten(dim, dim + 2)


class Scale(StateAction):
    """Divide a tensor by the number of ranks, for example a bias that every rank adds before an all-reduce."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def __repr__(self) -> str:
        return f"Scale(world_size={self.world_size})"

    def __call__(self, tensor: Tensor, rank: int) -> Tensor:
        return tensor / self.world_size


Action = StateAction | Callable[..., Any] | str


def resolved(action: Any, n: int) -> Callable[..., Any]:
    """Return an action as a function ``(value, rank=rank)`` for ``n`` ranks.

    Args:
        action: an action, a function, a pair of a function and its inverse, ``"split DIM"`` or ``"scale"``.

    Raises:
        ValueError: the action was made for another number of ranks.
    """
    action = action[0] if isinstance(action, tuple) else action
    if isinstance(action, str):
        name, *dim = action.split()
        return Split(n, int(dim[0])) if name == "split" else Scale(n)
    given = action.keywords if isinstance(action, partial) else getattr(action, "__dict__", {})
    if given.get("world_size", n) != n:
        raise ValueError(f"{action!r} is for {given['world_size']} ranks, and the model is sharded over {n}")
    found: Callable[..., Any] = action
    return found


def layout_of(action: Callable[..., Any], tensor: Tensor, n: int) -> Layout | None:
    """Return the layout that an action implements; ``None`` if its results are not shards of the tensor.

    The action runs on the positions of the elements. The result shows which elements each rank gets.
    """
    shape, known = tuple(tensor.shape), type(action) in (Split, SplitInChunks, SplitInGroupedChunks)
    if known and not -len(shape) <= action.dim < len(shape):  # type: ignore[attr-defined]
        raise ValueError(f"{action} has no such dimension in a tensor with the shape {list(shape)}")
    dims = [action.dim % len(shape)] if known else [*range(len(shape))]  # type: ignore[attr-defined]
    if known:  # these actions treat all other dimensions alike
        shape = tuple(size if dim == dims[0] else 1 for dim, size in enumerate(shape))
    positions = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)  # from 1, since zeros mean padding
    try:
        shards = [action(positions, rank=rank) for rank in range(n)]
    except (RuntimeError, TypeError, NotImplementedError):
        if known:
            raise
        return None  # the action does not work on integers
    if any(not isinstance(each, Tensor) or each.dtype != positions.dtype for each in shards):
        return None
    if all(torch.equal(each, positions) for each in shards):
        return Layout(tuple(tensor.shape))
    for dim in dims:
        rows = [_rows(positions, each, dim) for each in shards]
        if sorted(row for own in rows for row in own or [-1]) == [*range(shape[dim])]:
            return Layout(tuple(tensor.shape), dim, tuple(_ranges(own or []) for own in rows))
    return None


def _rows(positions: Tensor, shard: Tensor, dim: int) -> list[int] | None:
    """Return the indices along ``dim`` that a shard selects; ``None`` if it is not a selection along ``dim``."""
    if shard.dim() != positions.dim() or not positions.numel():
        return None
    if not shard.shape[dim]:
        return []
    first = shard.movedim(dim, 0).reshape(shard.shape[dim], -1)[:, :1].flatten()
    rows = (first - 1) // positions.stride(dim) % positions.shape[dim]
    return rows.tolist() if torch.equal(positions.index_select(dim, rows), shard) else None


def _ranges(rows: list[int]) -> tuple[tuple[int, int], ...]:
    if not rows:
        return ((0, 0),)
    breaks = [0, *(i + 1 for i, (one, other) in enumerate(pairwise(rows)) if other != one + 1), len(rows)]
    return tuple((rows[start], rows[stop - 1] + 1) for start, stop in pairwise(breaks))
