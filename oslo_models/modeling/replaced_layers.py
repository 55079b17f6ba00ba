"""Notices that a sharded layer was replaced by one that knows nothing of shards, as libraries for quantisation do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from oslo_models.distributed.mesh import Axis


class ShardedLayers:
    """The sharded layers of a model, and where they were when they were last seen.

    A layer that was replaced would still compute, but nothing would sum the partial results of the ranks. A layer may
    be wrapped (an adapter around it), and blocks may be removed or become `nn.Identity`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._paths = [path for path, module in modules.items() if _is_sharded(module)]
        self._edges = _edges(modules)

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
        for path in self._paths:
            path, module = _deepest(model, path)
            if type(module) is not nn.Identity and not any(_is_sharded(inner) for inner in module.modules()):
                cls = type(module)
                raise RuntimeError(
                    f"a sharded layer was replaced by one that does not combine the ranks' results: {path} is now "
                    f"{cls.__module__}.{cls.__qualname__}. {_instead(cls)}, or use tensor_parallel_size=1 (pipeline "
                    "stages may remain)"
                )
        self._edges = _edges(dict(model.named_modules()))


def _instead(cls: type) -> str:
    if cls.__module__.startswith("torchao.float8"):
        return "Call model.fuse(float8='tensorwise') or 'rowwise' instead, with the same arithmetic"
    return "Change weights in place instead, as torchao's quantize_() with Int8WeightOnlyConfig does"


def _edges(modules: Mapping[str, nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """Each module on the way to a sharded layer, wrappers included, with its parent and its name there."""
    paths = [path for path, module in modules.items() if _is_sharded(module)]
    prefixes = sorted({path[:end] for path in paths for end in _ends(path)})
    return [(modules[path.rpartition(".")[0]], path.rpartition(".")[2], modules[path]) for path in prefixes]


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("tp"), Axis)


def _ends(path: str) -> list[int]:
    """The ends of a path and of those of its parents."""
    return [*(position for position, letter in enumerate(path) if letter == "."), len(path)]


def _deepest(model: nn.Module, path: str) -> tuple[str, nn.Module]:
    """The module at a path, or the last one on the way there; wrappers that pass on attributes may stand on it."""
    found, names = model, path.split(".")
    for depth, name in enumerate(names):
        inner = getattr(found, name, None)
        if not isinstance(inner, nn.Module):
            return ".".join(names[:depth]), found
        found = inner
    return path, found
