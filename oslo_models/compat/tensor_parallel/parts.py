"""The part of each rank of a model that `tensor_parallel` shards."""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from oslo_models.compat.tensor_parallel.wrapper import move_part
from oslo_models.distributed.mesh import ParallelMesh
from oslo_models.distributed.thread_group import ThreadGroup
from oslo_models.modeling.quantizing import copy_to_device


def has_numpy(model: nn.Module) -> bool:
    """Return whether the model's transformers code may draw from numpy's generator. Few models import numpy at all."""
    return any("np" in vars(sys.modules[type(module).__module__]) for module in model.modules())


@torch.no_grad()
def make_part(
    model: Any, cls: type, config: PreTrainedConfig | None, threads: ThreadGroup, rank: int, device: torch.device
) -> Any:
    """Return the part of one rank on a device, without a copy of the full model."""
    shared = {} if config is None else {id(model.config): config}
    part: Any = copy.deepcopy(model, {**shared, **{id(param): param for param in model.parameters()}})
    part.__class__ = cls
    before = dict(part.named_parameters(remove_duplicate=False))
    part._shard(ParallelMesh.of_thread(threads, rank), None)
    made: dict[int, nn.Parameter] = {}
    for name, param in list(part.named_parameters(remove_duplicate=False)):
        full = before[name]
        if id(full) not in made:  # tied parameters are one object
            own = param.detach() if param.is_meta else copy_to_device(param, device, copy=param is full)
            made[id(full)] = nn.Parameter(own, full.requires_grad)
        owner, _, leaf = name.rpartition(".")
        part.get_submodule(owner)._parameters[leaf] = made[id(full)]
    return move_part(part, device)
