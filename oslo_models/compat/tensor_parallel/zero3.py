"""ZeRO stage 3 over the threads of one process, for parameters that tensor parallelism stores more than once.

These are replicated parameters such as norms, and key-value heads that several ranks need. Layers gather them for use.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from oslo_models.sharding.layout import Layout, Range, even_ranges

Piece = tuple[int, int, int]
"""A rank, and a range of rows of its shard that another rank gathers."""


def shard_shared(parts: Sequence[Any], names: Collection[str] | None) -> None:
    """Shard parameters that several ranks store, by rows. Their gradients and optimizer states follow.

    Layers gather the rows that they need. A gathered parameter exists only while a layer uses it.

    Args:
        parts: the models of the ranks; their ``layouts`` are updated.
        names: the names of the parameters; ``None``: all trained parameters with at least one row per rank.

    Raises:
        ValueError: a name is unknown, or its parameter cannot be sharded by rows.
    """
    params = dict(parts[0].named_parameters(remove_duplicate=False))
    for name in names or ():
        if why := _reason_against(parts[0].layouts.get(name), len(parts)):
            raise ValueError(f"sharded_param_names has {name!r}, which {why}")
    chosen = {
        id(param)
        for name, param in params.items()
        if (name in names if names is not None else param.requires_grad)
        and not _reason_against(parts[0].layouts.get(name), len(parts))
    }
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in [name for name, param in params.items() if id(param) in chosen]:  # tied parameters by all their names
        needed, held = held_once(parts[0].layouts[name], len(parts))
        owner, _, leaf = name.rpartition(".")
        modules = tuple(part.get_submodule(owner) for part in parts)
        for rank, (part, module) in enumerate(zip(parts, modules, strict=True)):
            old: Any = module._parameters[leaf]
            if old not in made:
                made[old] = nn.Parameter(_own_rows(old.detach(), needed, held, rank), old.requires_grad)
            part.layouts[name], module._parameters[leaf] = held, made[old]
            vars(module)["_of_ranks"] = modules
            vars(module).setdefault("_pieces", {})[leaf] = (held.dim, _pieces(needed, held, rank))
            cls: Any = type(module)
            module.__class__ = _gathering_class(cls, leaf, rank)


def held_once(layout: Layout, n: int) -> tuple[Layout, Layout]:
    """Return two layouts over ``n`` ranks: the ranges that each rank needs, and ranges that store each element once.

    The second layout splits each shared range evenly among the ranks that need it.
    """
    rows = layout.shape[0] if layout.dim is None else 0
    needed = Layout(layout.shape, 0, (((0, rows),),) * n) if layout.dim is None else layout
    held: list[tuple[Range, ...]] = []
    for rank, local in enumerate(needed.ranges):
        own = []
        for start, stop in local:
            sharing = [other for other in range(n) if (start, stop) in needed.ranges[other]]
            first, last = even_ranges(stop - start, len(sharing))[sharing.index(rank)]
            own.append((start + first, start + last))
        held.append(tuple(own))
    return needed, Layout(needed.shape, needed.dim, tuple(held))


def _own_rows(local: torch.Tensor, needed: Layout, held: Layout, rank: int) -> torch.Tensor:
    """Cut the rows that a rank stores out of the rows that it needs."""
    assert needed.dim is not None
    offset, rows = 0, []
    for (start, stop), (first, last) in zip(needed.ranges[rank], held.ranges[rank], strict=True):
        rows.append(local.narrow(needed.dim, offset + first - start, last - first))
        offset += stop - start
    return torch.cat(rows, needed.dim)


def _pieces(needed: Layout, held: Layout, rank: int) -> list[Piece]:
    """Return the pieces of other ranks' shards that make up a rank's rows, in order."""
    places: list[tuple[Range, Piece]] = []
    for other, local in enumerate(held.ranges):
        offset = 0
        for start, stop in local:
            places.append(((start, stop), (other, offset, offset + stop - start)))
            offset += stop - start
    pieces = []
    for start, stop in needed.ranges[rank]:
        pieces += [piece for (first, last), piece in sorted(places) if first < last and start <= first and last <= stop]
    return pieces


def _reason_against(layout: Layout | None, ranks: int) -> str | None:
    if layout is None:
        return "is no parameter of the model"
    if layout.dim is not None:
        return None if layout.overlaps else "is already sharded"
    if not layout.shape or layout.shape[0] < ranks:
        return f"has too few rows for {ranks} devices: {list(layout.shape)}"
    return None


@cache
def _gathering_class(cls: Any, leaf: str, rank: int) -> type:
    """Return a subclass that gathers the rows for this rank when ``leaf`` is read.

    The gradient flows to the shard of this rank only.
    """

    def read(module: nn.Module) -> Any:
        if leaf in vars(module):  # set by a layer while it computes
            return vars(module)[leaf]
        shards: list[Any] = [other._parameters[leaf] for other in vars(module)["_of_ranks"]]
        own = shards[rank]
        if own.is_meta:  # not loaded yet: loaders inspect the shard
            return own
        dim, pieces = vars(module)["_pieces"][leaf]
        # Each rank computes the gradient of all its gathered rows, and keeps only the rows of its shard.
        rows = [
            (own if other == rank else shards[other].detach()).narrow(dim, start, stop - start)
            for other, start, stop in pieces
        ]
        return torch.cat([part.to(own.device) for part in rows], dim)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, leaf: property(read)})
