"""Detects sharded layers that were replaced by plain layers, as quantisation libraries do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from oslo_models.distributed.mesh import Axis
from oslo_models.layers.vocab_parallel import VocabParallelEmbedding, VocabParallelHead, has_backward_hooks
from oslo_models.sharding.model_protocol import TransformersModel


class ShardedLayers:
    """Tracks the sharded layers of a model and their positions at the last check.

    A replaced layer would still compute, but no all-reduce would combine the ranks' partial results. Layers may be
    wrapped, unless the wrapper adds parameters. Blocks may be removed or replaced by `nn.Identity`.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = dict(model.named_modules())
        self._paths = [path for path, module in modules.items() if _is_sharded(module)]
        self._edges = _edges(modules)
        self._heads = _heads(modules)

    def check(self, model: TransformersModel) -> None:
        """Raise ``RuntimeError`` if a layer was replaced since the last call. Runs before each forward pass.

        The check takes a few dictionary lookups per block, unless a module was moved.
        """
        if torch.compiler.is_compiling():
            return
        for parent, name, child in self._edges:
            if parent._modules.get(name) is not child:
                self._look_again(model)
                break
        for head, modules in self._heads:
            head.gathers = any(map(has_backward_hooks, modules))

    def _look_again(self, model: TransformersModel) -> None:
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
    """Raise ``RuntimeError`` if a wrapper around a sharded layer adds parameters.

    The wrapper would see only this rank's features, and no all-reduce would combine its outputs. Embeddings are exempt,
    since they return full features. Layers of peft are exempt, since they are made parallel.
    """
    if _is_sharded(module) or any(base.__module__.startswith("peft.") for base in type(module).__mro__):
        return
    inner = [each for each in module.modules() if _is_sharded(each)]
    known = {param for each in inner for param in each.parameters()}
    own = [name for name, param in module.named_parameters() if param not in known]
    if own and inner and not isinstance(inner[0], VocabParallelEmbedding):
        raise RuntimeError(
            f"{path} is now a {type(module).__module__}.{type(module).__qualname__} with own parameters "
            f"({own[0]}) around a sharded layer. Its features are divided over the ranks, so the results would stay "
            "separate on each rank. Use an adapter of peft (get_peft_model), wrap a whole block, or use "
            "tensor_parallel_size=1 (pipeline stages may remain)"
        )


def _heads(modules: Mapping[str, nn.Module]) -> list[tuple[VocabParallelHead, list[nn.Module]]]:
    """Return each LM head with the modules on its path, since any of them may return the logits."""
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
    """Return each module on the path to a sharded layer, including wrappers, with its parent and name."""
    paths = [path for path, module in modules.items() if _is_sharded(module)]
    prefixes = sorted({path[:end] for path in paths for end in _ends(path)})
    return [(modules[path.rpartition(".")[0]], path.rpartition(".")[2], modules[path]) for path in prefixes]


def _is_sharded(module: nn.Module) -> bool:
    return isinstance(module.__dict__.get("tp"), Axis)


def _ends(path: str) -> list[int]:
    """Return the end positions of a path and of its parent paths."""
    return [*(position for position, letter in enumerate(path) if letter == "."), len(path)]


def _deepest(model: TransformersModel, path: str) -> tuple[str, Any]:
    """Return the module at a path, or the last one that exists on it. Wrappers on the path may forward attributes."""
    names = path.split(".")
    found: Any = model
    for depth, name in enumerate(names):
        inner = getattr(found, name, None)
        if not isinstance(inner, nn.Module):
            return ".".join(names[:depth]), found
        found = inner
    return path, found
