"""Initialises adapters with the values that ``peft`` draws for the full model, at any parallel size.

``peft`` draws initial values layer by layer from the default generator, in the shapes of this rank's layers. This
module draws them again with ``peft``'s own code, from the same generator state, but in the full shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners import ia3
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_models.checkpoint.quantized import PackedWeight
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.object_exchange import broadcast_object, gather_objects
from oslo_models.distributed.rng import default_generator
from oslo_models.modeling.adapters.experts import parameter_layout
from oslo_models.modeling.adapters.layouts import adapter_layouts, features
from oslo_models.pipeline.placeholders import zeros_without_memory
from oslo_models.pipeline.sharded_model import ShardedModel

_KINDS = (nn.Linear, Conv1D, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass
class _Drawn:
    """The inputs to draw one layer's adapter: the layer without weights, and the arguments of ``peft``'s class."""

    cls: type
    layer: nn.Module
    arguments: dict[str, Any]


@torch.no_grad()
def draw(model: ShardedModel, name: str, tuners: Mapping[str, Any], rng_state: Tensor) -> None:
    """Give the adapter ``name`` the same initial values as in the full model. This is a collective of all ranks.

    Args:
        tuners: the wrapped layers on this rank, by path.
        rng_state: this rank's default generator state before ``peft`` drew. All ranks use the state of world rank 0.
    """
    mesh, full_names = model.mesh, {} if model.stage is None else model.stage.full_names
    own = {path: _blueprint(tuner, name) for path, tuner in tuners.items() if _has(tuner, name)}
    here = {_full_path(path, full_names): path for path in own}
    stages = gather_objects(mesh.pp, {full: own[path] for full, path in here.items()})
    config = copy.copy(model.peft_config[name])
    if hasattr(config, "use_dora"):
        config.use_dora = False  # magnitudes are computed from weights, not drawn
    generator = default_generator(torch.get_default_device())
    shared = broadcast_object(mesh.world, rng_state)
    generator.set_state(shared)
    for path, drawn in _in_order_of_draws({path: drawn for stage in stages for path, drawn in stage.items()}):
        full: Any = drawn.cls(drawn.layer, name, config=config, **drawn.arguments)
        if path in here:
            _copy_shards(tuners[here[path]], full, mesh)
    if not torch.equal(shared, rng_state):  # a replica with a different random state keeps it
        generator.set_state(rng_state)


def _full_path(path: str, full_names: Mapping[str, str]) -> str:
    inner = path.removesuffix(".base_layer")
    return full_names.get(path, path) if inner == path else f"{_full_path(inner, full_names)}.base_layer"


def _in_order_of_draws(found: Mapping[str, _Drawn]) -> list[tuple[str, _Drawn]]:
    """Sort into ``peft``'s drawing order: parameters after all layers, the innermost wrapper of a module first."""
    layers = [each for each in found.items() if not issubclass(each[1].cls, ParamWrapper)]
    stacks: dict[str, list[tuple[str, _Drawn]]] = {}
    for path, drawn in found.items():
        if issubclass(drawn.cls, ParamWrapper):
            stacks.setdefault(path.replace(".base_layer", ""), []).insert(0, (path, drawn))
    return [*layers, *(each for wrappers in stacks.values() for each in wrappers)]


def _has(tuner: Any, name: str) -> bool:
    return any(f".{name}" in leaf and not param.is_meta for leaf, param in _own_parameters(tuner))


def _own_parameters(tuner: Any) -> list[tuple[str, nn.Parameter]]:
    return [(leaf, param) for leaf, param in tuner.named_parameters() if not leaf.startswith("base_layer.")]


def _copy_shards(tuner: Any, full: Any, mesh: ParallelMesh) -> None:
    """Copy this rank's shards of the full layer's adapter ``full`` into the adapter ``tuner``."""
    layouts, values = adapter_layouts(tuner), dict(_own_parameters(full))
    for leaf, param in _own_parameters(tuner):
        if leaf in values:
            layout, value = layouts.get(leaf), values[leaf].to(param.device)
            param.copy_(value if layout is None else layout.shard(value, mesh.rank_in(layout)))


def _blueprint(tuner: Any, name: str) -> _Drawn:
    base = tuner.get_base_layer()
    if isinstance(tuner, ParamWrapper):
        return _blueprint_of_stack(tuner, name)
    kind = next(kind for kind in _KINDS if isinstance(base, kind))
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    plain = (bool, int, float, str, tuple, type(None))
    vars(layer).update({key: value for key, value in vars(base).items() if isinstance(value, plain)})
    shape = base.weight.shape
    if isinstance(base, _KINDS[:3]):
        inputs, outputs = features(base)
        shape = (outputs, inputs) if isinstance(base, nn.Linear) else (inputs, outputs)
        layer.in_features, layer.out_features = layer.num_embeddings, layer.embedding_dim = inputs, outputs
    layer.weight = nn.Parameter(_zeros(shape, _type_of_adapters(base)), requires_grad=False)
    bias = getattr(base, "bias", None)
    layer.register_parameter("bias", None if bias is None else nn.Parameter(_zeros((1,), bias.dtype), False))
    if isinstance(tuner, ia3.IA3Layer):
        return _Drawn(_plain_class(tuner), layer, {"is_feedforward": tuner.is_feedforward})
    return _Drawn(_plain_class(tuner), layer, {"r": tuner.r[name], "lora_alpha": tuner.lora_alpha[name]})


def _blueprint_of_stack(tuner: Any, name: str) -> _Drawn:
    layer: Any = nn.Module()
    base, param = tuner.get_base_layer(), tuner.get_param()
    layout = parameter_layout(tuner)
    layer.is_transposed = getattr(base, "is_transposed", False)
    shape = tuple(param.shape) if layout is None else layout.shape
    layer.register_parameter(tuner.parameter_name, nn.Parameter(_zeros(shape, param.dtype), requires_grad=False))
    options = {"parameter_name": tuner.parameter_name, "r": tuner.r[name], "lora_alpha": tuner.lora_alpha[name]}
    return _Drawn(_plain_class(tuner), layer, options)


def use_type_of_adapters(tuner: Any) -> None:
    """Give a new adapter over a quantised weight the floating-point dtype that ``peft`` would choose."""
    base = tuner.get_base_layer()
    if isinstance(getattr(base, "weight", None), PackedWeight):
        for _, param in _own_parameters(tuner):
            if param.dtype == base.weight.dtype:
                param.data = param.data.to(_type_of_adapters(base))


def _type_of_adapters(base: Any) -> torch.dtype:
    dtype: torch.dtype = base.weight.dtype
    return torch.float32 if isinstance(base.weight, PackedWeight) and dtype.itemsize < 4 else dtype


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return zeros_without_memory(torch.Size(shape), dtype, torch.device("cpu"))


def _plain_class(tuner: Any) -> type:
    """Return ``peft``'s class of a wrapper. An earlier adapter may have changed it to a parallel class."""
    return next(cls for cls in type(tuner).__mro__ if cls.__module__.startswith("peft."))
