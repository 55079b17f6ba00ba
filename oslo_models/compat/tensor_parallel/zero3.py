"""What tensor parallelism leaves whole, divided too: among threads of one process, put together when it is used.

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
    """Divide parameters that all parts have whole, by rows: of each the ranks have one part, and so has an optimizer.

    Layers read the whole parameter still, which exists for as long as they use it.

    Args:
        parts: the models of the ranks, whose ``layouts`` follow.
        names: of the parameters; ``None``: all that are trained and have a row for each rank.

    Raises:
        ValueError: one of the names is none, or its parameter cannot be divided so.
    """
    params = dict(parts[0].named_parameters(remove_duplicate=False))
    for name in names or ():
        if why := _why_not(parts[0].layouts.get(name), len(parts)):
            raise ValueError(f"sharded_param_names has {name!r}, which {why}")
    chosen = {
        id(param)
        for name, param in params.items()
        if (name in names if names is not None else param.requires_grad)
        and not _why_not(parts[0].layouts.get(name), len(parts))
    }
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name in [name for name, param in params.items() if id(param) in chosen]:  # tied ones by all their names
        shape = parts[0].layouts[name].shape
        layout = Layout.divided(shape, 0, (EvenSplit(shape[0]),), len(parts))
        owner, _, leaf = name.rpartition(".")
        modules = tuple(part.get_submodule(owner) for part in parts)
        for rank, (part, module) in enumerate(zip(parts, modules, strict=True)):
            whole: Any = module._parameters[leaf]
            if whole not in made:
                made[whole] = nn.Parameter(layout.shard(whole.detach(), rank).clone(), whole.requires_grad)
            part.layouts[name], module._parameters[leaf] = layout, made[whole]
            vars(module)["_of_ranks"] = modules
            cls: Any = type(module)
            module.__class__ = _reading_whole(cls, leaf, rank)


def _why_not(layout: Layout | None, ranks: int) -> str | None:
    if layout is None:
        return "is no parameter of the model"
    if layout.dim is not None:
        return "is divided already"
    if not layout.shape or layout.shape[0] < ranks:
        return f"has too few rows for {ranks} devices: {list(layout.shape)}"
    return None


@cache
def _reading_whole(cls: Any, leaf: str, rank: int) -> type:
    """``cls`` whose attribute ``leaf`` is the whole parameter, with a gradient for the part of this rank."""

    def read(module: nn.Module) -> Any:
        if leaf in vars(module):  # put there by a layer, for as long as it computes
            return vars(module)[leaf]
        shards: list[Any] = [other._parameters[leaf] for other in vars(module)["_of_ranks"]]
        own = shards[rank]
        if own.is_meta:  # it waits for its weights: who brings them looks at what there is
            return own
        # Each rank has the gradient of the whole: its own part is all that it needs.
        return torch.cat([shard if shard is own else shard.detach().to(own.device) for shard in shards])

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, leaf: property(read)})
