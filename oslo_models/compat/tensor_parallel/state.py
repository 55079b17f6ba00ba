"""State dicts of models from `tensor_parallel`: full weights outside, one shard per rank inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.compat.tensor_parallel.config import Config
from oslo_models.modeling.quantizing import check_not_quantized
from oslo_models.sharding.layout import Layout


def merge_state(model: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Merge the state of the parts into full weights, in host memory. Tied tensors share memory."""
    parts = [_pop_prefixed(state, f"{prefix}parts.{rank}.") for rank in range(len(model.parts))]
    check_not_quantized(parts[0], "full weights are not put together from such shards: the original model has them")
    params = dict(model.parts[0].named_parameters(remove_duplicate=False))
    made: dict[int, Tensor] = {}
    for name, first in parts[0].items():
        layout, key = model.parts[0].layouts.get(name), id(params.get(name, first))
        if layout is None or layout.dim is None:
            state[prefix + name] = first.cpu()
            continue
        if key not in made:
            made[key] = first.new_empty(layout.shape, device="cpu")
            for rank, part in enumerate(parts):
                layout.write_shard(made[key], part[name], rank)
        state[prefix + name] = made[key]


def shard_state(model: Any, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """Shard the state of a full model for the parts. Shards from `convert_state_dict` pass unchanged."""
    layouts, given = model.parts[0].layouts, _pop_prefixed(state, prefix)
    fits = [name for name, tensor in given.items() if name in layouts and layouts[name].shape == tensor.shape]
    fitting = {name: given.pop(name) for name in fits}
    for name in [name for name in given if not name.startswith("parts.")]:  # torch reports unexpected names
        tensor = given.pop(name)
        given |= {f"parts.{rank}.{name}": tensor for rank in range(len(model.parts))}
    for name, tensor in {**given, **_shards_of(fitting, layouts, len(model.parts))}.items():
        if metadata.get("assign_to_params_buffers"):  # the tensor itself becomes the parameter
            tensor = tensor.to(model.devices[int(name.split(".")[1])], copy=True)
        state[prefix + name] = tensor


def convert_state_dict(
    input_state_dict: Mapping[str, Tensor],
    tensor_parallel_config: Mapping[str, Layout] | Config,
    world_size: int,
    for_pretrained: bool = False,
) -> dict[str, Tensor]:
    """Return the shards of all ranks, with the names of a model from `tensor_parallel`.

    Use it for models too large to load at once: convert the checkpoint file by file, and move each shard to its device
    in `infer_sharded_device_map`.

    Args:
        input_state_dict: weights of the full model, or some of them.
        tensor_parallel_config: ``model.tensor_parallel_config``, or the rules of a model.
        world_size: the number of devices over which the model is sharded.
        for_pretrained: accepted for compatibility, without effect.

    Raises:
        ValueError: a weight has another shape, or the model is sharded over another number of devices.
    """
    layouts = tensor_parallel_config
    if isinstance(layouts, Config):
        placed = layouts.layouts(input_state_dict, world_size)
        layouts = {name: layout for name, (layout, _) in placed.items()}
    shards = _shards_of(input_state_dict, layouts, world_size)
    return {name: tensor.clone() for name, tensor in shards.items()}  # views would keep the full weights in memory


def _shards_of(state: Mapping[str, Tensor], layouts: Mapping[str, Layout], ranks: int) -> dict[str, Tensor]:
    shards = {}
    for name, tensor in state.items():
        layout = layouts.get(name)
        if layout is not None and layout.dim is not None:
            if len(layout.ranges) != ranks:
                raise ValueError(f"world_size={ranks}, but the model is sharded over {len(layout.ranges)} devices")
            if tuple(tensor.shape) != layout.shape:
                raise ValueError(f"{name} has the shape {list(tensor.shape)} instead of {list(layout.shape)}")
        for rank in range(ranks):
            shards[f"parts.{rank}.{name}"] = tensor if layout is None else layout.shard(tensor, rank)
    return shards


def infer_sharded_device_map(model: Any) -> dict[str, torch.device]:
    """Return the device of each part of a model from `tensor_parallel`, by part name."""
    return {f"parts.{rank}": device for rank, device in enumerate(model.devices)}


def _pop_prefixed(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Remove the entries with this prefix from the state. Return them without the prefix."""
    names = [name for name in state if name.startswith(prefix)]
    return {name.removeprefix(prefix): state.pop(name) for name in names}


@contextmanager
def save_tensor_parallel(model: nn.Module) -> Iterator[nn.Module]:
    """Do nothing. Exists for compatibility: models are always saved in full here."""
    yield model
