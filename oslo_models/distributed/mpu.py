"""`MPU`: the mesh under Megatron's method names, for training scripts and DeepSpeed (``mpu=model.mpu``)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.distributed.collectives import receive, send
from oslo_models.distributed.mesh import Axis, ParallelMesh, start_process_group
from oslo_models.sharding.layout import even_ranges

T = TypeVar("T")


def _from_mesh(read: Callable[[ParallelMesh], T]) -> Callable[[MPU], T]:
    """Return a method that reads a value from the mesh."""

    def method(self: MPU) -> T:
        return read(self.mesh)

    return method


class MPU:
    """Model parallel unit of one model. Groups are ``None`` for a single process without a process group.

    Each axis has getters for its group, its size, the position of this rank and the global rank of its first member:

    * tensor-parallel ranks hold shards of the same layers;
    * context-parallel ranks hold the same parameters and divide the tokens of the same batch;
    * data-parallel ranks hold the same parameters and process different batches;
    * pipeline-parallel ranks hold successive stages;
    * the ranks of a model-parallel group together hold one copy of the model's weights;
    * the experts of a mixture-of-experts layer are sharded over the expert-model-parallel group;
    * the ranks of an expert-data-parallel group hold the same experts.

    A model has an MPU as ``model.mpu``. ``MPU(tensor_parallel_size, pipeline_parallel_size)`` creates the groups
    without a model. ``MPU(mesh)`` uses the groups of a mesh. Every rank has to call it with the same sizes.

    Raises:
        ValueError: the sizes do not fit the number of processes.
        RuntimeError: more than one process is needed and no launcher was used.
    """

    def __init__(self, tensor_parallel_size: int | ParallelMesh = 1, pipeline_parallel_size: int = 1) -> None:
        sizes = tensor_parallel_size, pipeline_parallel_size
        if isinstance(tensor_parallel_size, ParallelMesh):
            self.mesh = tensor_parallel_size
            if pipeline_parallel_size != 1:
                raise ValueError(f"pipeline_parallel_size={sizes[1]} was passed with a mesh, which has its own sizes")
        else:
            self.mesh = ParallelMesh(tensor_parallel_size, pipeline_parallel_size)
        self._first_and_last_stage: Axis | None = None
        self._neighbours: dict[tuple[int, ...], dist.ProcessGroup | None] | None = None

    @staticmethod
    def initialize_distributed() -> None:
        """Start ``torch.distributed`` from the launcher's variables, unless it is running. Models do so too."""
        start_process_group()

    def __deepcopy__(self, memo: dict[int, object]) -> MPU:
        return self

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist. Also true for a single process, since it needs no groups."""
        return not self.mesh.destroyed and (self.mesh.device_mesh is None or dist.is_initialized())

    def destroy_model_parallel(self) -> None:
        """Destroy the groups of this model. The model is unusable afterwards. Every rank has to call it."""
        self.mesh.destroy()

    get_tensor_parallel_group = _from_mesh(lambda mesh: mesh.tp.group)
    get_data_parallel_group = _from_mesh(lambda mesh: mesh.dp.group)
    get_pipeline_parallel_group = _from_mesh(lambda mesh: mesh.pp.group)
    get_context_parallel_group = _from_mesh(lambda mesh: mesh.cp.group)
    get_model_parallel_group = _from_mesh(lambda mesh: mesh.weights.group)

    get_tensor_parallel_world_size = _from_mesh(lambda mesh: mesh.tp.size)
    get_data_parallel_world_size = _from_mesh(lambda mesh: mesh.dp.size)
    get_pipeline_parallel_world_size = _from_mesh(lambda mesh: mesh.pp.size)
    get_context_parallel_world_size = _from_mesh(lambda mesh: mesh.cp.size)
    get_model_parallel_world_size = _from_mesh(lambda mesh: mesh.weights.size)

    get_tensor_parallel_rank = _from_mesh(lambda mesh: mesh.tp.rank)
    get_data_parallel_rank = _from_mesh(lambda mesh: mesh.dp.rank)
    get_pipeline_parallel_rank = _from_mesh(lambda mesh: mesh.pp.rank)
    get_context_parallel_rank = _from_mesh(lambda mesh: mesh.cp.rank)
    get_model_parallel_rank = _from_mesh(lambda mesh: mesh.weights.rank)

    get_tensor_parallel_src_rank = _from_mesh(lambda mesh: mesh.tp.ranks[0])
    get_data_parallel_src_rank = _from_mesh(lambda mesh: mesh.dp.ranks[0])
    get_pipeline_parallel_src_rank = _from_mesh(lambda mesh: mesh.pp.ranks[0])
    get_model_parallel_src_rank = _from_mesh(lambda mesh: mesh.weights.ranks[0])

    get_context_parallel_global_ranks = _from_mesh(lambda mesh: list(mesh.cp.ranks))
    get_data_parallel_group_ranks = _from_mesh(lambda mesh: list(mesh.dp.ranks))
    is_pipeline_first_stage = _from_mesh(lambda mesh: mesh.pp.rank == 0)
    is_pipeline_last_stage = _from_mesh(lambda mesh: mesh.pp.rank == mesh.pp.size - 1)

    # Neighbouring stages, and stages that share the embedding

    def get_embedding_tied_group(self) -> dist.ProcessGroup | None:
        """Return the group of the first and last stage; ``None`` on other stages or without pipeline parallelism.

        The first call creates the group, so every rank of the world has to call this. The model does not use it.
        """
        if self._first_and_last_stage is None and self.mesh.pp.size > 1:
            self._first_and_last_stage = self.mesh.stages((0, self.mesh.pp.size - 1), "embedding")
        return self._first_and_last_stage.group if self._first_and_last_stage is not None else None

    def get_p2p_communication_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
        """Return the groups of this rank with each neighbouring stage. The last stage is a neighbour of the first.

        The key of a group of two is ``(source, destination)``, both global ranks. The key of this rank alone is
        ``(rank,)``. Empty without pipeline parallelism. The first call creates the groups, so every rank of the world
        has to call this. The model itself does not use them.
        """
        if self._neighbours is None:
            self._neighbours, count = {}, self.mesh.pp.size
            pairs = {(stage, stage + 1) for stage in range(count - 1)} | ({(0, count - 1)} if count > 1 else set())
            for stages in [*sorted(pairs), *((stage,) for stage in range(count if count > 1 else 0))]:
                axis = self.mesh.stages(stages, "p2p")
                if axis.ranks:
                    self._neighbours |= {axis.ranks: axis.group, axis.ranks[::-1]: axis.group}
        return self._neighbours

    @torch.no_grad()
    def p2p(self, tensor: Tensor, src_stage: int, dst_stage: int) -> bool:
        """Copy ``tensor`` of the source stage into ``tensor`` of the destination stage, of the same shape and dtype.

        Returns:
            Whether this rank is on one of the two stages. Ranks of other stages need not call it.

        Raises:
            ValueError: a stage does not exist, or the stages are equal.
        """
        count, rank = self.mesh.pp.size, self.mesh.pp.rank
        if src_stage == dst_stage or not (0 <= src_stage < count and 0 <= dst_stage < count):
            raise ValueError(f"src_stage={src_stage} and dst_stage={dst_stage} must be two of {count} stages, from 0")
        if rank == src_stage:
            send(self.mesh.pp, tensor.contiguous(), dst_stage)
        elif rank == dst_stage:
            tensor.copy_(receive(self.mesh.pp, tensor.detach().clone(memory_format=torch.contiguous_format), src_stage))
        return rank in (src_stage, dst_stage)

    @staticmethod
    def make_pipeline_partition(num_items: int, num_parts: int) -> list[int]:
        """Return the bounds of ``num_parts`` equal ranges of ``num_items`` items. The last range takes the remainder.

        The ``num_parts + 1`` bounds begin with 0. Part ``i`` has the items from the ``i``-th bound to the next. With
        fewer items than parts, the first parts get one item each. Stages of a model are balanced by their parameters
        instead, unless ``blocks_per_stage`` is given.
        """
        if num_items < 0 or num_parts < 1:
            raise ValueError(f"num_items={num_items} must be at least 0 and num_parts={num_parts} at least 1")
        each = max(num_items // num_parts, 1)
        return [*(min(each * part, num_items) for part in range(num_parts)), num_items]

    get_embedding_global_ranks = _from_mesh(lambda mesh: sorted({mesh.pp.ranks[0], mesh.pp.ranks[-1]}))
    get_embedding_tied_world_size = _from_mesh(lambda mesh: min(2, mesh.pp.size))
    get_p2p_communication_global_ranks = _from_mesh(lambda mesh: [list(pair) for pair in pairwise(mesh.pp.ranks)])
    get_p2p_communication_world_size = _from_mesh(lambda mesh: min(2, mesh.pp.size))
    get_pipeline_model_parallel_global_ranks_per_group = _from_mesh(lambda mesh: list(mesh.pp.ranks))
    get_pipeline_parallel_global_ranks_across_all_groups = _from_mesh(
        lambda mesh: [[0]] if mesh.device_mesh is None else mesh.device_mesh.mesh.flatten(1).T.tolist()
    )

    # Megatron-core's names, for DeepSpeed

    get_tensor_model_parallel_group = get_tensor_parallel_group
    get_tensor_model_parallel_world_size = get_tensor_parallel_world_size
    get_tensor_model_parallel_rank = get_tensor_parallel_rank
    get_tensor_model_parallel_src_rank = get_tensor_parallel_src_rank
    get_pipeline_model_parallel_group = get_pipeline_parallel_group
    get_pipeline_model_parallel_world_size = get_pipeline_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipeline_parallel_rank

    get_expert_model_parallel_group = _from_mesh(lambda mesh: mesh.experts.group)
    get_expert_model_parallel_world_size = _from_mesh(lambda mesh: mesh.experts.size)
    get_expert_model_parallel_rank = _from_mesh(lambda mesh: mesh.experts.rank)
    get_expert_data_parallel_group = _from_mesh(lambda mesh: mesh.expert_replicas.group)
    get_expert_data_parallel_world_size = _from_mesh(lambda mesh: mesh.expert_replicas.size)
    get_expert_data_parallel_rank = _from_mesh(lambda mesh: mesh.expert_replicas.rank)

    # Tensor-parallel collectives with a backward pass; see `autograd_collectives` ------------------------------------

    def broadcast(self, inputs: Tensor) -> Tensor:
        """Identity forward, sum over the tensor-parallel group backward."""
        return copy_to(self.mesh.tp, inputs)

    def reduce(self, inputs: Tensor) -> Tensor:
        """Sum over the tensor-parallel group forward, identity backward."""
        return reduce_from(self.mesh.tp, inputs.clone())

    def scatter(self, inputs: Tensor) -> Tensor:
        """Return the local shard of the last dimension, split as evenly as possible; backward gathers."""
        sizes = [stop - start for start, stop in even_ranges(inputs.shape[-1], self.mesh.tp.size)]
        return scatter_to(self.mesh.tp, inputs, -1, sizes)

    def gather(self, inputs: Tensor) -> Tensor:
        """Concatenate equal shards along the last dimension; backward takes the local shard."""
        return gather_from(self.mesh.tp, inputs, -1, [inputs.shape[-1]] * self.mesh.tp.size)
