"""`MPU`: the mesh with Megatron's method names, which training scripts and DeepSpeed (``mpu=model.mpu``) call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.distributed.mesh import Axis, ParallelMesh
from oslo_models.sharding.layout import even_ranges

T = TypeVar("T")


def _from_mesh(read: Callable[[ParallelMesh], T]) -> Callable[[MPU], T]:
    """A method that returns something read from the mesh."""

    def method(self: MPU) -> T:
        return read(self.mesh)

    return method


class MPU:
    """The model parallel unit of one model. Groups are ``None`` for a single process without a process group.

    For each axis there are getters of its group, its size, the position of this rank and the global rank of its first
    member. Ranks of a tensor-parallel group hold shards of the same layers, those of a data-parallel group the same
    parameters for different batches, those of a pipeline-parallel group successive stages; the ranks of a
    model-parallel group hold one replica of the model together.
    """

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh
        self._first_and_last_stage: Axis | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> MPU:
        return self

    def model_parallel_is_initialized(self) -> bool:
        """Whether the groups exist; also true for a single process, which needs none."""
        return not self.mesh.destroyed and (self.mesh.device_mesh is None or dist.is_initialized())

    def destroy_model_parallel(self) -> None:
        """Destroy the groups of this model, which cannot be used any more. Every rank has to call it."""
        self.mesh.destroy()

    get_tensor_parallel_group = _from_mesh(lambda mesh: mesh.tp.group)
    get_data_parallel_group = _from_mesh(lambda mesh: mesh.dp.group)
    get_pipeline_parallel_group = _from_mesh(lambda mesh: mesh.pp.group)
    get_model_parallel_group = _from_mesh(lambda mesh: mesh.model.group)

    get_tensor_parallel_world_size = _from_mesh(lambda mesh: mesh.tp.size)
    get_data_parallel_world_size = _from_mesh(lambda mesh: mesh.dp.size)
    get_pipeline_parallel_world_size = _from_mesh(lambda mesh: mesh.pp.size)
    get_model_parallel_world_size = _from_mesh(lambda mesh: mesh.model.size)

    get_tensor_parallel_rank = _from_mesh(lambda mesh: mesh.tp.rank)
    get_data_parallel_rank = _from_mesh(lambda mesh: mesh.dp.rank)
    get_pipeline_parallel_rank = _from_mesh(lambda mesh: mesh.pp.rank)
    get_model_parallel_rank = _from_mesh(lambda mesh: mesh.model.rank)

    get_tensor_parallel_src_rank = _from_mesh(lambda mesh: mesh.tp.ranks[0])
    get_data_parallel_src_rank = _from_mesh(lambda mesh: mesh.dp.ranks[0])
    get_pipeline_parallel_src_rank = _from_mesh(lambda mesh: mesh.pp.ranks[0])
    get_model_parallel_src_rank = _from_mesh(lambda mesh: mesh.model.ranks[0])

    get_data_parallel_group_ranks = _from_mesh(lambda mesh: list(mesh.dp.ranks))
    is_pipeline_first_stage = _from_mesh(lambda mesh: mesh.pp.rank == 0)
    is_pipeline_last_stage = _from_mesh(lambda mesh: mesh.pp.rank == mesh.pp.size - 1)

    # Neighbouring stages, and stages that share the embedding

    def get_embedding_tied_group(self) -> dist.ProcessGroup | None:
        """The group of the first and the last stage; ``None`` on other stages and without pipeline parallelism.

        The first call creates it, so every rank of the world has to call this. The model itself does not use it.
        """
        if self._first_and_last_stage is None and self.mesh.pp.size > 1:
            self._first_and_last_stage = self.mesh.stages((0, self.mesh.pp.size - 1), "embedding")
        return self._first_and_last_stage.group if self._first_and_last_stage is not None else None

    get_embedding_global_ranks = _from_mesh(lambda mesh: sorted({mesh.pp.ranks[0], mesh.pp.ranks[-1]}))
    get_embedding_tied_world_size = _from_mesh(lambda mesh: min(2, mesh.pp.size))
    get_p2p_communication_global_ranks = _from_mesh(lambda mesh: [list(pair) for pair in pairwise(mesh.pp.ranks)])
    get_p2p_communication_world_size = _from_mesh(lambda mesh: min(2, mesh.pp.size))
    get_pipeline_model_parallel_global_ranks_per_group = _from_mesh(lambda mesh: list(mesh.pp.ranks))
    get_pipeline_parallel_global_ranks_across_all_groups = _from_mesh(
        lambda mesh: [[0]] if mesh.device_mesh is None else mesh.device_mesh.mesh.flatten(1).T.tolist()
    )

    # Names of Megatron-core, which DeepSpeed uses

    get_tensor_model_parallel_group = get_tensor_parallel_group
    get_tensor_model_parallel_world_size = get_tensor_parallel_world_size
    get_tensor_model_parallel_rank = get_tensor_parallel_rank
    get_tensor_model_parallel_src_rank = get_tensor_parallel_src_rank
    get_pipeline_model_parallel_group = get_pipeline_parallel_group
    get_pipeline_model_parallel_world_size = get_pipeline_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipeline_parallel_rank

    # Tensor-parallel collectives with a backward pass; see `autograd_collectives` ------------------------------------

    def broadcast(self, inputs: Tensor) -> Tensor:
        """Identity forward, sum over the tensor-parallel group backward."""
        return copy_to(self.mesh.tp, inputs)

    def reduce(self, inputs: Tensor) -> Tensor:
        """Sum over the tensor-parallel group forward, identity backward."""
        return reduce_from(self.mesh.tp, inputs.clone())

    def scatter(self, inputs: Tensor) -> Tensor:
        """This rank's shard of the last dimension, split as evenly as possible; backward gathers."""
        sizes = [stop - start for start, stop in even_ranges(inputs.shape[-1], self.mesh.tp.size)]
        return scatter_to(self.mesh.tp, inputs, -1, sizes)

    def gather(self, inputs: Tensor) -> Tensor:
        """Concatenate equal shards along the last dimension; backward takes the local shard."""
        return gather_from(self.mesh.tp, inputs, -1, [inputs.shape[-1]] * self.mesh.tp.size)
