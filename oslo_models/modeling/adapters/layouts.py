"""Derives the layouts of an adapter's parameters from the layout of the adapted layer."""

from __future__ import annotations

from typing import Any

from peft.tuners.ia3 import IA3Layer
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from oslo_models.distributed.mesh import Axis
from oslo_models.layers.experts import ParallelExperts
from oslo_models.layers.gathered import DerivedLayer
from oslo_models.modeling.adapters.experts import layouts_of_factors
from oslo_models.sharding.layout import Layout


def weight_layout(layer: nn.Module) -> Layout | None:
    """Return the weight layout of an adapted layer, or ``None`` if the weight or its adapters are replicated."""
    layout = _layouts(layer).get("weight")
    return None if layout is None or layout.dim is None or isinstance(layer, DerivedLayer) else layout


def takes_full_tensors(layer: nn.Module) -> bool:
    """Whether a sharded layer takes and returns full tensors, so that its adapters are replicated."""
    layout = _layouts(layer).get("weight")
    return isinstance(layer, DerivedLayer) and layout is not None and layout.dim is not None


def shards_outputs(layer: nn.Module) -> bool:
    """Whether a layer shards its outputs: the output features, or the feature dimension of an embedding."""
    outputs = 0 if isinstance(layer, nn.Linear) else 1
    layout = weight_layout(layer)
    return layout is not None and layout.dim == outputs


def features(layer: Any) -> tuple[int, int]:
    """Return the full input and output sizes of an adapted layer. For an embedding: vocabulary and embedding size."""
    layout = _layouts(layer).get("weight")
    shape = tuple(layer.weight.shape) if layout is None else layout.shape
    return (shape[1], shape[0]) if isinstance(layer, nn.Linear) else (shape[0], shape[1])


def _layouts(layer: nn.Module) -> dict[str, Layout]:
    return getattr(layer, "layouts", None) or {}


def adapter_layouts(tuner: Any) -> dict[str, Layout]:
    """Return the layouts of a ``peft`` wrapper's sharded parameters, by their names in the wrapper."""
    if isinstance(tuner, AuxiliaryTrainingWrapper):
        return _layouts_of_copies(tuner)
    base = tuner.get_base_layer()
    if isinstance(tuner, ParamWrapper):
        found = {f"base_layer.{leaf}": layout for leaf, layout in getattr(base, "layouts", {}).items()}
        return _of_own(tuner, found | layouts_of_factors(tuner))
    found = {f"base_layer.{leaf}": layout for leaf, layout in _layouts(base).items()}
    weight = weight_layout(base)
    if weight is None:
        return _of_own(tuner, found)
    inputs, outputs = features(base)

    def sharded(*shape: int, dim: int) -> Layout:
        return Layout(shape, dim, weight.ranges)

    if isinstance(tuner, IA3Layer):
        for name in tuner.ia3_l:
            if tuner.is_feedforward != shards_outputs(base):
                shape = (1, inputs) if tuner.is_feedforward else (outputs, 1)
                found[f"ia3_l.{name}"] = sharded(*shape, dim=int(tuner.is_feedforward))
    elif isinstance(tuner, LoraLayer):
        for name, rank in tuner.r.items():
            if not shards_outputs(base):
                found[f"lora_A.{name}.weight"] = sharded(rank, inputs, dim=1)
                found[f"lora_embedding_A.{name}"] = sharded(rank, inputs, dim=1)
            else:
                found[f"lora_B.{name}.weight"] = sharded(outputs, rank, dim=0)
                found[f"lora_embedding_B.{name}"] = sharded(outputs, rank, dim=0)
                for leaf in (f"lora_B.{name}.bias", f"lora_magnitude_vector.{name}.weight"):
                    found[leaf] = sharded(outputs, dim=0)
    return _of_own(tuner, found)


def _of_own(tuner: Any, layouts: dict[str, Layout]) -> dict[str, Layout]:
    """Filter for sharded parameters that the wrapper has."""
    own = {name for name, _ in tuner.named_parameters()}
    return {name: layout for name, layout in layouts.items() if name in own and layout.dim is not None}


def _layouts_of_copies(wrapper: AuxiliaryTrainingWrapper) -> dict[str, Layout]:
    """Return the layouts of sharded parameters in ``modules_to_save``: the original module and its copies."""
    return {
        f"{path}.{leaf}": layout
        for path, module in wrapper.named_modules()
        for leaf, layout in vars(module).get("layouts", {}).items()
        if layout.dim is not None
    }


def axis_of(wrapper: nn.Module, layout: Layout) -> Axis:
    """Return the axis over which a ``peft`` wrapper's parameter is sharded, according to its layout."""
    axes: list[Any] = [vars(module).get("tp") for module in wrapper.modules()]
    axes += [module.mesh.experts for module in wrapper.modules() if isinstance(module, ParallelExperts)]
    return next(axis for axis in axes if isinstance(axis, Axis) and axis.size == len(layout.ranges))
