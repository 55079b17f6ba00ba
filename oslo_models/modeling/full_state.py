"""State dicts of the full model: ``load_state_dict`` takes this rank's part of each tensor."""

from __future__ import annotations

from typing import Any

import torch

from oslo_models.distributed.sharded_tensor.tensors import PLAIN
from oslo_models.modeling.internals import ParallelModelInternals


def take_part(model: ParallelModelInternals, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Reduce a state dict to the tensors and shards of this rank. Shards, as `state_dict` returns them, stay.

    This is a pre-hook of ``load_state_dict``. ``state`` is a shallow copy of the argument.
    """
    if not model.mesh.is_sharded:
        return
    stage = model.stage
    if stage is not None:
        for name, full_name in stage.full_names.items():
            if prefix + name not in state and prefix + full_name in state:
                state[prefix + name] = state[prefix + full_name]
    local = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, layout in model.layouts.items():
        value = state.get(prefix + name)
        if not isinstance(value, torch.Tensor) or type(value) not in PLAIN or name not in local:
            continue
        if tuple(value.shape) == tuple(layout.shape) != tuple(local[name].shape):
            state[prefix + name] = layout.shard(value, model.mesh.rank_in(layout)).clone()
    if stage is not None:
        blocks = tuple(f"{stack.blocks}." for stack in stage.stacks)
        for key in [key for key in state if key.startswith(prefix)]:
            name = key[len(prefix) :]
            is_models = name in model.full_layouts or name in stage.tied_names or name.startswith(blocks)
            if is_models and name not in local:
                del state[key]
