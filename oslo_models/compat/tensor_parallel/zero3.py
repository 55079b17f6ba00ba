"""Shards parameters that tensor parallelism replicates over the threads of one process, and gathers them for use.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 3.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from oslo_models.sharding.layout import EvenSplit, Layout


def shard_replicated(parts: Sequence[Any], names: Collection[str] | None) -> None:
    """Shard replicated parameters by rows, and with them their gradients and optimizer states.

    Layers read the full parameter, which exists only while they use it.

    Args:
        parts: the models of the ranks, whose ``layouts`` follow.
        names: the names of the parameters; ``None``: all that are trained and have a row for each rank.

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
        shape = parts[0].layouts[name].shape
        layout = Layout.sharded(shape, 0, (EvenSplit(shape[0]),), len(parts))
        owner, _, leaf = name.rpartition(".")
        modules = tuple(part.get_submodule(owner) for part in parts)
        for rank, (part, module) in enumerate(zip(parts, modules, strict=True)):
            full: Any = module._parameters[leaf]
            if full not in made:
                made[full] = nn.Parameter(layout.shard(full.detach(), rank).clone(), full.requires_grad)
            part.layouts[name], module._parameters[leaf] = layout, made[full]
            vars(module)["_of_ranks"] = modules
            cls: Any = type(module)
            module.__class__ = _gathering_class(cls, leaf, rank)


def _reason_against(layout: Layout | None, ranks: int) -> str | None:
    if layout is None:
        return "is no parameter of the model"
    if layout.dim is not None:
        return "is already sharded"
    if not layout.shape or layout.shape[0] < ranks:
        return f"has too few rows for {ranks} devices: {list(layout.shape)}"
    return None


@cache
def _gathering_class(cls: Any, leaf: str, rank: int) -> type:
    """A subclass whose attribute ``leaf`` gathers the full parameter, with a gradient for this rank's shard."""

    def read(module: nn.Module) -> Any:
        if leaf in vars(module):  # set by a layer while it computes
            return vars(module)[leaf]
        shards: list[Any] = [other._parameters[leaf] for other in vars(module)["_of_ranks"]]
        own = shards[rank]
        if own.is_meta:  # not loaded yet: loaders inspect the shard
            return own
        # Each rank has the gradient of the full parameter, and needs only that of its shard.
        return torch.cat([shard if shard is own else shard.detach().to(own.device) for shard in shards])

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, leaf: property(read)})
