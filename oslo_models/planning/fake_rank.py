"""Simulates one rank of a job in this process, with torch's fake process group and tensors on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from oslo_models.distributed.mesh import ParallelMesh


@contextmanager
def fake_rank(
    rank: int,
    world_size: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    expert_parallel_size: int = 1,
    tensor_parallel_shares: Sequence[int] | None = None,
    context_parallel_size: int = 1,
) -> Iterator[ParallelMesh]:
    """Yield the mesh of one rank. Its collectives return at once and move no data.

    Raises:
        RuntimeError: this process already belongs to a process group.
        ValueError: the sizes do not fit the number of processes, as in the constructors.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError(
            "planning takes the place of ranks, and this process is already one of a process group: plan in a process "
            "that no launcher started, or before torch.distributed starts"
        )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        mesh = ParallelMesh(
            tensor_parallel_size,
            pipeline_parallel_size,
            expert_parallel_size=expert_parallel_size,
            tensor_parallel_shares=tensor_parallel_shares,
            context_parallel_size=context_parallel_size,
        )
        mesh.device = torch.device("meta")
        yield mesh
        mesh.destroy()
    finally:
        dist.destroy_process_group()
