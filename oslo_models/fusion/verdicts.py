"""Remember in this process which fusions agreed with their originals, so that another model alike needs no check.

The key of a verdict has everything that the verdict depends on except the values of the weights: the config, the
compared layers with their sizes, the fused classes, the settings of torch, and the current functions of all classes
involved. A patched function is another function, so a patch leads to another check.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, NoneType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oslo_kernels.linear import FasterRows
from oslo_models.contracts.sources import globals_of
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.fusion.decoder_blocks import BlockDecoding
from oslo_models.fusion.decoder_layers import BlockForm
from oslo_models.fusion.swap import Fusion, FusionCandidate
from oslo_models.pipeline.sharded_model import ShardedModel

Key = tuple[Any, ...]
_MOST = 16
"""The number of verdicts to remember. A key has some thousand entries."""
_unchecked: dict[Key, dict[str, str]] = {}
_FUNCTIONS = (FunctionType, property, staticmethod, classmethod)
_SIMPLE = (bool, int, float, str, NoneType, torch.dtype, torch.device)
_COMMON = (Cache, DynamicCache, DynamicLayer, BlockDecoding)
_OF_MODULES = vars(nn.Module()).keys()


def is_known(key: Key) -> bool:
    """Return whether a fusion with this key agreed with its originals."""
    return key in _unchecked


def unchecked(key: Key) -> dict[str, str]:
    """Return the kinds that a known check could not compare, with the reasons."""
    return _unchecked[key]


def remember(key: Key, unchecked: dict[str, str]) -> None:
    """Remember a fusion that agreed with its originals."""
    while len(_unchecked) >= _MOST:
        del _unchecked[next(iter(_unchecked))]
    _unchecked[key] = unchecked


def forget() -> None:
    """Forget all verdicts."""
    _unchecked.clear()


def key_of(
    model: ShardedModel,
    fusion: Fusion,
    modules: Mapping[str, nn.Module],
    names: Iterable[str],
    candidates: Iterable[FusionCandidate],
) -> Key:
    """Return the key of the verdict on a fusion.

    Args:
        modules: all modules of the model, by name.
        names: the modules to compare.
    """
    compared = {at: module for name in names for at, module in modules[name].named_modules(prefix=name)}
    fused = {c.module: (c.operation, c.cls, _values(c.attributes)) for c in candidates if c.module in compared}
    with without_override():
        layers = tuple((at, *_of_layer(module), fused.get(at)) for at, module in compared.items())
    base = model.base_model
    classes: set[type] = {type(module) for module in (*compared.values(), *base.children())}
    classes |= {cls for _, cls, _ in fused.values() if cls is not None}
    mesh = model.mesh
    ranks = None if mesh is None else tuple((axis.size, axis.rank) for axis in (mesh.tp, mesh.pp))
    return (
        *(type(model), type(base), *_code(type(base).forward), repr(vars(model.config)), ranks),
        *(fusion.backend, fusion.weights, fusion.float8, *_settings(model)),
        *(layers, *ALL_ATTENTION_FUNCTIONS.items()),
        *(each for cls in sorted({*classes, *_COMMON}, key=str) for each in _of_class(cls)),
    )


def _settings(model: ShardedModel) -> Iterator[Any]:
    kind = model.device.type
    yield from (model.device, model.dtype, model.main_input_name, torch.get_default_dtype(), torch.get_num_threads())
    yield from (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled())
    if torch.amp.is_autocast_available(kind):
        yield from (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    yield torch.backends.mkldnn.enabled
    yield from (torch.is_inference_mode_enabled(), torch.backends.cuda.flash_sdp_enabled())


def _of_layer(module: nn.Module) -> Iterator[Any]:
    yield type(module)
    yield _values({name: value for name, value in vars(module).items() if name not in _OF_MODULES})
    for tensors in (module._parameters, module._buffers):
        for name, x in tensors.items():
            yield name, None if x is None else (type(x), x.shape, x.dtype, x.device, x.requires_grad)
    yield from (len(module._forward_hooks), len(module._forward_pre_hooks))
    yield object() if "forward" in vars(module) else None  # an object equals no other: this module is always checked


def _values(value: Any) -> Any:
    """Return simple values, the contents of containers and configs, and the classes of other values."""
    if isinstance(value, (*_SIMPLE, FunctionType, BlockForm)):
        return value
    if isinstance(value, Mapping):
        return tuple((name, _values(each)) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_values, value))
    if isinstance(value, (PreTrainedConfig, FasterRows)):
        return repr(vars(value))
    return type(value), _values(value.__reduce__()[1]) if isinstance(value, BlockDecoding) else None


def _of_class(cls: type) -> Iterator[Any]:
    """Yield the functions of a class and of its bases before torch's, and the functions that its forward calls."""
    yield cls
    for each in cls.__mro__:
        if each not in (nn.Module, object):
            yield from (value for value in vars(each).values() if isinstance(value, _FUNCTIONS))
    yield from _code(getattr(cls, "forward", None))


def _code(function: Any) -> Iterator[Any]:
    for each in (function, *globals_of(function)) if isinstance(function, FunctionType) else ():
        yield from (each, each.__code__)
