"""Optimizers that need a matrix as a whole (Muon, Shampoo, SOAP, GaLore), on sharded models.

Each matrix is assigned to one rank of its tensor-parallel group. This rank keeps the full parameter and its optimizer
state. Before a step, it gathers the gradients. After the step, each rank takes its shard of the result. The updates
therefore equal single-process updates, and the optimizer states are distributed over the ranks.

Source: the distribution of whole matrices over ranks follows Shi et al., "A Distributed Data-Parallel PyTorch
Implementation of the Distributed Shampoo Optimizer", 2023.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from oslo_models.distributed.collectives import broadcast
from oslo_models.distributed.sharded_tensor import Shard, ShardedParameter, Sharding, local_tensor


@dataclass
class _Matrix:
    """A sharded parameter, with the full parameter on the rank that updates it."""

    param: ShardedParameter
    owner: int
    full: nn.Parameter | None = None


def matrix_optimizer(cls: type[Optimizer], parameters: Iterable[nn.Parameter], **options: Any) -> Optimizer:
    """See `TrainableModel.matrix_optimizer`."""
    given = list(parameters)
    for param in given:
        if not isinstance(param, nn.Parameter):
            raise ValueError(f"parameters must be parameters of the model, got a {type(param).__name__}")
    matrices = _distribute([param for param in given if isinstance(param, ShardedParameter)])
    own = [param for param in given if not isinstance(param, ShardedParameter)]
    own += [matrix.full for matrix in matrices if matrix.full is not None]
    # an optimizer rejects an empty list, so pass a parameter without a gradient, which it never updates
    optimizer = cls(own or [nn.Parameter(given[0].new_zeros(1, 1))], **options)
    optimizer.register_step_pre_hook(lambda *_: _gather(matrices))
    optimizer.register_step_post_hook(lambda *_: _take_shards(matrices))
    return optimizer


def _distribute(params: list[ShardedParameter]) -> list[_Matrix]:
    """Assign the matrices, largest first, each to the rank with the fewest elements so far. Allocate them there."""
    if not params:
        return []
    tp = params[0].sharding.mesh.tp
    for param in params:
        if param.sharding.mesh.is_over_replicas(param.sharding.layout):
            raise ValueError(
                f"{param.sharding.name} is sharded over several replicas, but matrix_optimizer gathers within one "
                "replica: give model.expert_parameters() an optimizer that works element by element, such as AdamW"
            )
    loads, owners = [0] * tp.size, {}
    for param in sorted(params, key=lambda param: -_elements(param)):
        owners[id(param)] = owner = loads.index(min(loads))
        loads[owner] += _elements(param)
    matrices = [_Matrix(param, owners[id(param)]) for param in params]
    for matrix in matrices:
        if matrix.owner == tp.rank:
            full = local_tensor(matrix.param).new_zeros(matrix.param.sharding.layout.shape)
            matrix.full = nn.Parameter(full, matrix.param.requires_grad)
    return matrices


def _elements(param: ShardedParameter) -> int:
    return torch.Size(param.sharding.layout.shape).numel()


@torch.no_grad()
def _gather(matrices: list[_Matrix]) -> None:
    """Gather gradients and values: other code may have changed the parameters since the last step."""
    for matrix in matrices:
        grad, values = matrix.param.grad, matrix.param.full_tensor()
        full_grad = None if grad is None else cast(Shard, grad).full_tensor()
        if matrix.full is not None:
            matrix.full.copy_(values)
            matrix.full.grad = full_grad


@torch.no_grad()
def _take_shards(matrices: list[_Matrix]) -> None:
    for matrix in matrices:
        sharding: Sharding = matrix.param.sharding
        tp, local = sharding.mesh.tp, local_tensor(matrix.param)
        full = local.new_empty(sharding.layout.shape) if matrix.full is None else matrix.full.detach().clone()
        local.copy_(sharding.layout.shard(broadcast(tp, full, matrix.owner), tp.rank))
        if matrix.full is not None:
            matrix.full.grad = None
