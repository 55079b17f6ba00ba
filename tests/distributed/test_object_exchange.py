"""Objects between ranks: through the process group first, then through the memory of the host."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from oslo_kernels.shared_memory import SharedMemory
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.memory_of_objects import memory_of_objects
from oslo_models.distributed.mesh import Axis, ParallelMesh, world_axis
from oslo_models.distributed.object_exchange import gather_objects
from oslo_models.distributed.watchdog import RankFailedError

from support.pool import Pool
from support.waiting import wait_until


def exchange(axis: Axis, number: int) -> bool:
    """Exchange objects, one of them long; return whether the ranks share memory afterwards."""

    def value(position: int) -> tuple[int, int, str]:
        return axis.ranks[position], number, "x" * (20_000 * position if number % 2 else position)

    assert gather_objects(axis, value(axis.rank)) == [value(position) for position in range(axis.size)]
    return memory_of_objects(axis).memory is not None


def exchange_on_axes() -> None:
    mesh = ParallelMesh(2)
    for axis in (mesh.world, mesh.tp, mesh.dp):
        assert [exchange(axis, number) for number in range(5)] == [False, *[True] * 4]
    assert exchange(world_axis(), 5), "another axis over all ranks does not share the memory of the world"


def test_objects_go_through_memory_from_the_third_exchange_on(pool: Pool) -> None:
    pool.run(4, exchange_on_axes)


def exchange_late() -> None:
    axis = world_axis(1.0)
    for number in range(4):
        if number == 3 and axis.rank == 1:
            time.sleep(3.0)
        exchange(axis, number)


def test_exchange_waits_for_a_busy_rank_beyond_the_timeout(pool: Pool) -> None:
    pool.run(2, exchange_late)


def collective_late(exchanges: int, raised: Path) -> None:
    """Rank 1 is alive but misses the first collective, which prepares shared memory for the group."""
    axis = world_axis(1.0)
    for number in range(exchanges):
        exchange(axis, number)
    if axis.rank == 1:
        wait_until(raised.exists)
        return
    with pytest.raises(RankFailedError, match=r"rank 1 .* did not come"):
        all_reduce(axis, torch.ones(3))
    raised.touch()


@pytest.mark.parametrize("exchanges", [0, 3])
def test_the_first_collective_waits_no_longer_than_the_timeout(pool: Pool, tmp_path: Path, exchanges: int) -> None:
    """Its exchange goes through the process group, or through shared memory."""
    pool.run(2, collective_late, exchanges, tmp_path / "raised")


def exchange_between_hosts() -> None:
    axis = world_axis()

    def attach(address: str, rank: int, size: int) -> SharedMemory:
        raise FileNotFoundError(address)

    with pytest.MonkeyPatch.context() as patch:
        if axis.rank == 2:
            patch.setattr(SharedMemory, "attach", attach)
        assert [exchange(axis, number) for number in range(4)] == [False] * 4


def test_ranks_that_cannot_share_memory_exchange_through_the_process_group(pool: Pool) -> None:
    pool.run(3, exchange_between_hosts)
