"""`MPU`: the groups, ranks and collectives of a model under OSLO 1's and Megatron's names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oslo_models import MPU, GPT2LMHeadModel
from oslo_models.distributed.mesh import ParallelMesh

from support import pipelines
from support.pool import Pool


def members(group: Any) -> list[int]:
    return dist.get_process_group_ranks(group)


def of_axis(mpu: MPU, axis: str) -> tuple[list[int], int, int, int]:
    """Return the members, the size, this rank's position and the first member of one axis, from its getters."""
    group, size, rank = (getattr(mpu, f"get_{axis}_parallel_{what}")() for what in ("group", "world_size", "rank"))
    return members(group), size, rank, getattr(mpu, f"get_{axis}_parallel_src_rank")()


def describe() -> dict[str, Any]:
    """Return the answers of ``MPU(2, 2)`` on this rank of eight."""
    MPU.initialize_distributed()
    mpu = MPU(2, 2)
    assert mpu.model_parallel_is_initialized()
    found: dict[str, Any] = {axis: of_axis(mpu, axis) for axis in ("tensor", "data", "pipeline", "model")}
    for axis in ("tensor", "data", "pipeline", "model"):  # the groups reduce over the ranks that they list
        total = torch.tensor(2 ** dist.get_rank())
        dist.all_reduce(total, group=getattr(mpu, f"get_{axis}_parallel_group")())
        assert total == sum(2**rank for rank in found[axis][0])
    found["stages"] = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    tied = mpu.get_embedding_tied_group()
    found["tied"] = members(tied), mpu.get_embedding_tied_world_size(), mpu.get_embedding_global_ranks()
    found["p2p"] = {key: members(group) for key, group in mpu.get_p2p_communication_groups().items()}
    assert mpu.get_p2p_communication_groups() is mpu.get_p2p_communication_groups()
    found["pipelines"] = mpu.get_pipeline_parallel_global_ranks_across_all_groups()
    assert mpu.get_pipeline_model_parallel_global_ranks_per_group() == found["pipeline"][0]
    assert mpu.get_p2p_communication_global_ranks() == [found["pipeline"][0]]
    assert mpu.get_p2p_communication_world_size() == 2
    mpu.destroy_model_parallel()
    assert not mpu.model_parallel_is_initialized() and dist.is_initialized()
    assert mpu.get_pipeline_parallel_group() is mpu.get_model_parallel_group() is None
    dist.barrier()
    return found


def test_sizes_make_the_groups(pool: Pool) -> None:
    """Tensor-parallel ranks are adjacent, replicas come next, and pipeline stages are farthest apart."""
    for rank, found in enumerate(pool.run(8, describe)):
        tp, dp, pp = rank % 2, rank // 2 % 2, rank // 4
        first = rank - tp
        line = [rank - 4 * pp, rank - 4 * pp + 4]
        replicas = [rank - 2 * dp, rank - 2 * dp + 2]
        assert found["tensor"] == ([first, first + 1], 2, tp, first)
        assert found["data"] == (replicas, 2, dp, replicas[0])
        assert found["pipeline"] == (line, 2, pp, line[0])
        assert found["model"] == ([2 * dp, 2 * dp + 1, 2 * dp + 4, 2 * dp + 5], 4, 2 * pp + tp, 2 * dp)
        assert found["stages"] == (pp == 0, pp == 1)
        assert found["tied"] == (line, 2, line)
        assert found["p2p"] == {tuple(line): line, tuple(line[::-1]): line, (rank,): [rank]}
        assert found["pipelines"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


def pass_along() -> tuple[Tensor, dict[tuple[int, ...], list[int]], list[bool]]:
    """Send a row from stage 0 to stage 2 of three, and a transposed matrix back."""
    mpu = MPU(pipeline_parallel_size=3)
    rank = mpu.get_pipeline_parallel_rank()
    tensor = torch.full((2, 3), float(rank), requires_grad=rank == 2)
    took_part = [mpu.p2p(tensor[0], 0, 2), mpu.p2p(tensor.T, 2, 1)]
    for stages in ((1, 1), (0, 3), (-1, 0)):
        with pytest.raises(ValueError, match="must be two of 3 stages, from 0"):
            mpu.p2p(tensor, *stages)
    groups = mpu.get_p2p_communication_groups()
    for pair in [key for key in sorted(groups) if len(key) == 2 and key[0] < key[1]]:
        total = torch.tensor(float(rank))
        dist.all_reduce(total, group=groups[pair])
        assert total == sum(pair)
    return tensor.detach(), {key: members(group) for key, group in groups.items()}, took_part


def test_tensors_go_from_stage_to_stage(pool: Pool) -> None:
    found = pool.run(3, pass_along)
    assert [tensor.tolist() for tensor, _, _ in found] == [
        [[0.0] * 3] * 2,
        [[0.0] * 3, [2.0] * 3],
        [[0.0] * 3, [2.0] * 3],
    ]
    assert [took_part for _, _, took_part in found] == [[True, False], [False, True], [True, True]]
    for rank, (_, groups, _) in enumerate(found):
        pairs = [(rank, (rank + 1) % 3), (rank, (rank - 1) % 3)]
        assert groups == {(rank,): [rank]} | {key: sorted(pair) for pair in pairs for key in (pair, pair[::-1])}


def test_one_process_is_every_group() -> None:
    mpu = MPU()
    assert mpu.model_parallel_is_initialized() and mpu.get_p2p_communication_groups() == {}
    assert mpu.get_embedding_tied_group() is None and mpu.get_model_parallel_group() is None
    assert mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage()
    with pytest.raises(ValueError, match="pipeline_parallel_size=2 was passed with a mesh"):
        MPU(ParallelMesh(), 2)
    with pytest.raises(RuntimeError, match="4 processes are needed"):
        MPU(2, 2)


def check_collectives(full: Tensor) -> None:
    """Run forward and backward of the four operations with an unevenly split last dimension."""
    mpu = MPU(2)
    rank = mpu.get_tensor_parallel_rank()
    sizes = [3, 2]
    for operation, gradient in (
        (mpu.broadcast, lambda weight: 2 * weight),
        (mpu.reduce, lambda weight: weight),
        (mpu.scatter, lambda weight: weight),
    ):
        x = full.clone().requires_grad_()
        y = operation(x)
        assert torch.equal(x, full)
        expected = {mpu.broadcast: full, mpu.reduce: 2 * full, mpu.scatter: full.split(sizes, -1)[rank]}[operation]
        assert torch.equal(y, expected)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, gradient(torch.ones_like(full)))
    x = full[:, rank : rank + 1].clone().requires_grad_()
    y = mpu.gather(x)
    assert torch.equal(y, full[:, :2])
    y.backward(full[:, :2])
    assert torch.equal(x.grad, full[:, rank : rank + 1])


def test_collectives_have_the_gradients_of_megatron(pool: Pool, seed: int) -> None:
    pool.run(2, check_collectives, torch.randn(2, 5, generator=torch.Generator().manual_seed(seed)))


def check_model() -> None:
    model = GPT2LMHeadModel.from_config_with_parallel(pipelines.config("gpt2"), 1, 2)
    assert model.base_model.mpu is model.mpu and model.base_model is model.transformer
    assert isinstance(model.mpu, MPU) and model.is_pipeline_parallelized() and model.is_model_parallelized()
    assert not model.is_tensor_parallelized() and model.is_data_parallelized()
    held = [param.shape for param in model.gpu_parameters()]
    assert held == [param.shape for param in model.gpu_modules().parameters()] and held
    other = GPT2LMHeadModel.from_config_with_parallel(pipelines.config("gpt2"), 2, 1)
    assert other.base_model.mpu is other.mpu is not model.mpu and other.mpu.get_pipeline_parallel_world_size() == 1
    assert len(list(model.gpu_parameters())) == len(held)  # a second model of a class does not change the first


def test_two_models_of_one_class_have_groups_and_modules_of_their_own(pool: Pool) -> None:
    pool.run(4, check_model)


@pytest.mark.parametrize(("items", "parts"), [(12, 4), (13, 4), (15, 4), (3, 4), (0, 2), (7, 1)])
def test_pipeline_partition_leaves_the_rest_to_the_last_stage(items: int, parts: int) -> None:
    bounds = MPU.make_pipeline_partition(items, parts)
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    assert bounds[0] == 0 and bounds[-1] == items and len(sizes) == parts
    if items >= parts:
        assert set(sizes[:-1]) <= {items // parts} and sizes[-1] == items // parts + items % parts
    else:
        assert sizes == [1] * items + [0] * (parts - items)


def test_impossible_partitions_are_rejected() -> None:
    for items, parts in ((-1, 2), (4, 0)):
        with pytest.raises(ValueError, match=f"num_items={items} must be at least 0 and num_parts={parts}"):
            MPU.make_pipeline_partition(items, parts)
