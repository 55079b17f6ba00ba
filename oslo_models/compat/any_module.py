"""`initialize` for modules outside transformers: the plan is derived from the module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oslo_models.config.arguments import Arguments
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.distributed.rng import synchronize, synchronize_numpy
from oslo_models.modeling.derived.deriving import derive_for_model
from oslo_models.modeling.derived.module import DerivedModule, derived_class


@torch.no_grad()
def initialize_module(model: Any, arguments: Arguments, inputs: Any, world: Axis, broadcast_weights: Any) -> Any:
    """Shard a module of any class for this rank, in place. A collective.

    Args:
        model: a full module with weights.
        arguments: the arguments of `initialize`.
        inputs: arguments of a call that verifies the plan.
        world: all ranks.
        broadcast_weights: ``broadcast_weights(model, mesh)`` gives all ranks the weights of rank 0.

    Raises:
        ValueError: an argument is invalid, or no plan could be derived; on every rank, with the model unchanged.
        RuntimeError: the model is already sharded.
    """
    with agree(world, "deriving a plan"):
        if isinstance(model, DerivedModule):
            raise RuntimeError(f"this {type(model).__name__} is already sharded")
        if arguments.plan != "derive":
            raise ValueError(
                f'a {type(model).__name__} is no model of transformers\' kind: pass plan="derive", and inputs= of a '
                "call"
            )
        if arguments.pipeline_parallel_size > 1:
            raise ValueError(
                f"pipeline_parallel_size={arguments.pipeline_parallel_size}: the plan of a {type(model).__name__} is "
                "derived and does not name its blocks; use tensor_parallel_size"
            )
        arguments.check({})
        plan = derive_for_model(model, inputs)
    tensors = {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()}
    require_equal(world, {**tensors, "plan": str(plan.report)}, "arguments of initialize")
    mesh = ParallelMesh(
        arguments.tensor_parallel_size,
        timeout=arguments.timeout,
        tensor_parallel_shares=arguments.tensor_parallel_shares,
    )
    return shard_in_place(model, derived_class(type(model), plan), mesh, broadcast_weights)


@torch.no_grad()
def shard_in_place(model: Any, cls: type, mesh: ParallelMesh, broadcast_weights: Any) -> Any:
    """Shard a module for this rank, in place, with the weights of rank 0. A collective.

    Args:
        cls: the parallel class, a subclass of `DerivedModule`.
        broadcast_weights: as of `initialize_module`.
    """
    broadcast_weights(model, mesh)
    before: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    model.__class__ = cls
    model._shard(mesh)
    for name, param in list(model.named_parameters(remove_duplicate=False)):  # an optimizer may refer to the objects
        owner, _, leaf = name.rpartition(".")
        old = before[name]
        old.data, old.grad = param.data, None
        model.get_submodule(owner)._parameters[leaf] = old
    model.to(mesh.device)
    model._mark_parameters()
    synchronize(mesh.tp, mesh.device)
    synchronize_numpy(mesh.tp)
    return model
