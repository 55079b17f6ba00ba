"""`MPU`: the mesh under Megatron's names, as training scripts and DeepSpeed (``mpu=model.mpu``) ask for it."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from oslo_models.collectives import copy_to, gather_from, reduce_from, scatter_to
from oslo_models.layout import even_ranges
from oslo_models.mesh import Axis, ParallelMesh


class MPU:
    """The model parallel unit of one model. Groups are ``None`` where one process runs without a process group."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self.mesh = mesh

    def __deepcopy__(self, memo: dict[int, object]) -> MPU:
        return self

    def model_parallel_is_initialized(self) -> bool:
        """Whether the groups exist (with one process and no process group there is nothing to make: true as well)."""
        return self.mesh.device_mesh is None or dist.is_initialized()

    # Groups -----------------------------------------------------------------------------------------------------------

    def get_tensor_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of the same layers."""
        return self.mesh.tp.group

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same parameters and see different batches."""
        return self.mesh.dp.group

    def get_pipeline_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the successive stages."""
        return self.mesh.pp.group

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold one copy of the model together (tensor and pipeline parallel)."""
        return self.mesh.model.group

    # Sizes ------------------------------------------------------------------------------------------------------------

    def get_tensor_parallel_world_size(self) -> int:
        return self.mesh.tp.size

    def get_data_parallel_world_size(self) -> int:
        return self.mesh.dp.size

    def get_pipeline_parallel_world_size(self) -> int:
        return self.mesh.pp.size

    def get_model_parallel_world_size(self) -> int:
        return self.mesh.model.size

    # Ranks ------------------------------------------------------------------------------------------------------------

    def get_tensor_parallel_rank(self) -> int:
        return self.mesh.tp.rank

    def get_data_parallel_rank(self) -> int:
        return self.mesh.dp.rank

    def get_pipeline_parallel_rank(self) -> int:
        return self.mesh.pp.rank

    def get_model_parallel_rank(self) -> int:
        return self.mesh.model.rank

    def get_tensor_parallel_src_rank(self) -> int:
        """The global rank of the first rank of this tensor-parallel group."""
        return self.mesh.tp.ranks[0]

    def get_data_parallel_src_rank(self) -> int:
        return self.mesh.dp.ranks[0]

    def get_pipeline_parallel_src_rank(self) -> int:
        return self.mesh.pp.ranks[0]

    def get_model_parallel_src_rank(self) -> int:
        return self.mesh.model.ranks[0]

    def is_pipeline_first_stage(self) -> bool:
        return self.mesh.pp.rank == 0

    def is_pipeline_last_stage(self) -> bool:
        return self.mesh.pp.rank == self.mesh.pp.size - 1

    def get_data_parallel_group_ranks(self) -> list[int]:
        """The global ranks of the data-parallel group."""
        return list(self.mesh.dp.ranks)

    # The names of Megatron-core, by which DeepSpeed asks

    get_tensor_model_parallel_group = get_tensor_parallel_group
    get_tensor_model_parallel_world_size = get_tensor_parallel_world_size
    get_tensor_model_parallel_rank = get_tensor_parallel_rank
    get_tensor_model_parallel_src_rank = get_tensor_parallel_src_rank
    get_pipeline_model_parallel_group = get_pipeline_parallel_group
    get_pipeline_model_parallel_world_size = get_pipeline_parallel_world_size
    get_pipeline_model_parallel_rank = get_pipeline_parallel_rank

    # Tensor-parallel collectives that autograd knows; see `oslo_models.collectives` ---------------------------------

    def broadcast(self, inputs: Tensor) -> Tensor:
        """Identity forward, sum over the tensor-parallel group backward."""
        return copy_to(self.mesh.tp, inputs)

    def reduce(self, inputs: Tensor) -> Tensor:
        """Sum over the tensor-parallel group forward, identity backward."""
        return reduce_from(self.mesh.tp, inputs.clone())

    def scatter(self, inputs: Tensor) -> Tensor:
        """This rank's part of the last dimension, divided as evenly as possible; backward gathers."""
        return scatter_to(self.mesh.tp, inputs, -1, _even_sizes(self.mesh.tp, inputs.shape[-1]))

    def gather(self, inputs: Tensor) -> Tensor:
        """Concatenate equal parts along the last dimension; backward takes the own part."""
        return gather_from(self.mesh.tp, inputs, -1, [inputs.shape[-1]] * self.mesh.tp.size)


def _even_sizes(axis: Axis, count: int) -> list[int]:
    return [stop - start for start, stop in even_ranges(count, axis.size)]
