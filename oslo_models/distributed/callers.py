"""Whose call this is: wrappers of torch and DeepSpeed do not tell a model what they are about to do with it."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from oslo_models.distributed.mesh import ParallelMesh


def object_under_construction(cls: str) -> Any:
    """The object of a class of this name, or of one derived from it, whose constructor is on the call stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # its own constructor is in a module that knows it by name; locals, which are slow to ask for, then tell
        if frame.f_code.co_name == "__init__" and cls in frame.f_globals:
            owner = frame.f_locals.get("self")
            if any(base.__name__ == cls for base in type(owner).__mro__):
                return owner
        frame = frame.f_back
    return None


def refuse_fsdp1(model: str) -> None:
    """Raise ``ValueError`` if torch's first ``FullyShardedDataParallel`` is being constructed around shards.

    It takes each rank's shards for full parameters: over all ranks it mixes those of different ranks, over replicas
    whose experts differ it mixes experts, and its ``clip_grad_norm_`` counts the shards of one rank only.
    """
    if object_under_construction("FullyShardedDataParallel") is not None:
        raise ValueError(
            f"FullyShardedDataParallel would take the shards of this {model} for full parameters: use its successor, "
            'torch.distributed.fsdp.fully_shard(model, mesh=model.mesh.device_mesh["dp"]), with '
            "ignored_params=set(model.expert_parameters()), or DistributedDataParallel"
        )


def is_listed_by_fully_shard() -> bool:
    """Whether the caller of the caller is where ``fully_shard`` lists parameters."""
    return sys._getframe(2).f_code.co_name == "_get_managed_states"


def require_replicas_in_fully_shard(what: str, mesh: ParallelMesh) -> None:
    """Raise ``ValueError`` if ``fully_shard`` is on the call stack, over ranks with other shards.

    Args:
        what: the model or the parameter that it shards.
    """
    frame = sys._getframe()
    while frame.f_code.co_name != "fully_shard":
        if frame.f_back is None:
            return
        frame = frame.f_back
    given = getattr(frame.f_locals.get("mesh"), "mesh", None)
    ranks = [] if given is None else sorted(given.flatten().tolist())
    if not set(ranks) <= set(mesh.dp.ranks):
        raise ValueError(
            f"fully_shard over ranks {ranks} would mix the shards of different ranks: ranks {list(mesh.model.ranks)} "
            f"hold {what} together (tensor_parallel_size={mesh.tp.size}, pipeline_parallel_size={mesh.pp.size}), "
            f"and its replicas are on ranks {list(mesh.dp.ranks)}. Pass them: "
            'fully_shard(model, mesh=model.mesh.device_mesh["dp"])'
        )


def computes_in_layer(sharding: Any) -> bool:
    """Whether code of a model or of a wrapper computes with a shard, rather than code that handles parameters.

    Code of a model is the code of transformers' models and of this library, and the ``forward`` of the module that owns
    the parameter. torch's wrappers communicate over ranks that they were given.
    """
    frame: FrameType | None = sys._getframe(2)
    is_outermost_of_torch = False
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        if code.co_filename.startswith("<eval_with_key>"):  # a graph of torch.compile, operation by operation
            return True
        if not is_outermost_of_torch and name not in _OF_SHARDS:
            if name.startswith(_MODEL_CODE):
                return True
            is_outermost_of_torch = not name.startswith("torch.")
        if code.co_name == "forward" and _owns(frame.f_locals.get("self"), sharding):
            return True
        frame = frame.f_back
    return False


def _owns(module: Any, sharding: Any) -> bool:
    parameters = module._parameters.values() if isinstance(module, nn.Module) else ()
    return any(getattr(param, "sharding", None) is sharding for param in parameters)


_OF_SHARDS = ("oslo_models.distributed.sharded_tensor", "oslo_models.distributed.partial_norm")
_MODEL_CODE = (
    *("oslo_models.", "transformers.models.", "transformers.integrations.", "transformers_modules.", "peft."),
    *("torch.distributed.", "deepspeed."),
)


def calling_optimizer() -> str | None:
    """The class of the optimizer whose step is on the call stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code.co_name == "step" and isinstance(owner := frame.f_locals.get("self"), torch.optim.Optimizer):
            return type(owner).__name__
        frame = frame.f_back
    return None
