"""Notices that a sharded layer was replaced by one that knows nothing of shards, as libraries for quantisation do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from oslo_models.distributed.mesh import Axis
from oslo_models.layers.vocab_parallel import VocabParallelEmbedding, VocabParallelHead, has_backward_hooks


class ShardedLayers:
    """The sharded layers of a model, and where they were when they were last seen.

    A layer that was replaced would still compute, but nothing would sum the partial results of the ranks. A layer may
    be wrapped, unless the wrapper has parameters of its own, and blocks may be removed or become `nn.Identity`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._paths = [path for path, module in modules.items() if _is_sharded(module)]
        self._edges = _edges(modules)
        self._heads = _heads(modules)

    def check(self, model: nn.Module) -> None:
        """Raise ``RuntimeError`` if a layer was replaced since the last call; called before each forward pass.

        A few dictionary lookups per block, unless some module changed its place.
        """
        if torch.compiler.is_compiling():
            return
        for parent, name, child in self._edges:
            if parent._modules.get(name) is not child:
                self._look_again(model)
                break
        for head, modules in self._heads:
            head.gathers = any(map(has_backward_hooks, modules))

    def _look_again(self, model: nn.Module) -> None:
        for layer in self._paths:
            path, module = _deepest(model, layer)
            if path == layer:
                _require_no_parameters(path, module)
            if type(module) is not nn.Identity and not any(_is_sharded(inner) for inner in module.modules()):
                cls = type(module)
                raise RuntimeError(
                    f"a sharded layer was replaced by one that does not combine the ranks' results: {path} is now "
                    f"{cls.__module__}.{cls.__qualname__}. {_instead(cls)}, or use tensor_parallel_size=1 (pipeline "
                    "stages may remain)"
                )
        modules = dict(model.named_modules())
        self._edges, self._heads = _edges(modules), _heads(modules)


def _require_no_parameters(path: str, module: nn.Module) -> None:
    """Raise ``RuntimeError`` if a module with parameters of its own stands around a sharded layer.

    It would see the features of this rank, and nothing would sum over the ranks what it adds. An embedding returns the
    full features, and the layers of peft are adopted.
    """
    if _is_sharded(module) or any(base.__module__.startswith("peft.") for base in type(module).__mro__):
        return
    inner = [each for each in module.modules() if _is_sharded(each)]
    known = {param for each in inner for param in each.parameters()}
    own = [name for name, param in module.named_parameters() if param not in known]
    if own and inner and not isinstance(inner[0], VocabParallelEmbedding):
        raise RuntimeError(
            f"{path} is now a {type(module).__module__}.{type(module).__qualname__} with parameters of its own "
            f"({own[0]}) around a sharded layer, whose features are divided over the ranks: nothing would combine what "
            "the ranks compute with them. Use an adapter of peft (get_peft_model), wrap a whole block, or use "
            "tensor_parallel_size=1 (pipeline stages may remain)"
        )


def _heads(modules: Mapping[str, nn.Module]) -> list[tuple[VocabParallelHead, list[nn.Module]]]:
    """Each head, and the modules on the way to it, whose outputs its logits may be."""
    return [
        (module, [modules[path[:end]] for end in _ends(path)])
        for path, module in modules.items()
        if isinstance(module, VocabParallelHead)
    ]


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
