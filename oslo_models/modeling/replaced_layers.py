"""Notices that a sharded layer was replaced by one that knows nothing of shards, as libraries for quantisation do."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from oslo_models.distributed.mesh import Axis


class ShardedLayers:
    """The sharded layers of a model, and where they were when they were last seen.

    A layer that was replaced would still compute, but nothing would sum the partial results of the ranks. A layer may
    be wrapped (an adapter around it), and blocks may be removed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._paths = [path for path, module in model.named_modules() if _is_sharded(module)]
        self._edges = list(self._seen(model))

    def check(self, model: nn.Module) -> None:
        """Raise ``RuntimeError`` if a layer was replaced since the last call; called before each forward pass.

        A few dictionary lookups per block, unless some module changed its place.
        """
        if torch.compiler.is_compiling():
            return
        for parent, name, child in self._edges:
            if parent._modules.get(name) is not child:
                self._look_again(model)
                return

    def _look_again(self, model: nn.Module) -> None:
        replaced = {}
        for path in self._paths:
            module = _get(model, path)
            if module is not None and not any(_is_sharded(inner) for inner in module.modules()):
                replaced[path] = type(module)
        if replaced:
            path, cls = next(iter(replaced.items()))
            raise RuntimeError(
                f"{len(replaced)} sharded layers were replaced by layers that do not combine the results of the ranks: "
                f"{path} is now {cls.__module__}.{cls.__qualname__}. Change weights in place instead, as torchao's "
                "quantize_() with Int8WeightOnlyConfig does, or use tensor_parallel_size=1 (pipeline stages may remain)"
            )
        self._edges = list(self._seen(model))

    def _seen(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
        """Each module on the way to a sharded layer, with its parent and its name there."""
        prefixes = {path[:end] for path in self._paths for end in _ends(path)}
        for path in sorted(prefixes):
            parent, name = _get(model, path.rpartition(".")[0]), path.rpartition(".")[2]
            child = None if parent is None else parent._modules.get(name)
            if parent is not None and child is not None:
                yield parent, name, child


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("tp"), Axis)


def _ends(path: str) -> list[int]:
    """The ends of a path and of those of its parents."""
    return [*(position for position, letter in enumerate(path) if letter == "."), len(path)]


def _get(model: nn.Module, path: str) -> nn.Module | None:
    """The module at a path; wrappers that pass on attributes may stand on the way."""
    found: object = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) else None
