"""All-reduce, reduce-scatter and all-gather through shared memory: values, and failures of a rank."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from oslo_kernels import build
from oslo_kernels.shared_memory import DTYPES, SLOT, PeerError, SharedMemory
from oslo_models.distributed import collectives
from oslo_models.distributed.autograd_collectives import gather_from
from oslo_models.distributed.collectives import all_reduce, reduce_scatter
from oslo_models.distributed.mesh import ParallelMesh

from support.pool import Pool


def memory_of(n: int) -> SharedMemory:
    memory = collectives.shared_memory_of(ParallelMesh(n).tp)
    assert memory is not None
    return memory


def files() -> set[str]:
    """Return the files in /dev/shm, without files of concurrent tests: folders, tensors of loaders, semaphores."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("tmp", "torch_", "sem."))}


def check_reductions(seed: int) -> None:
    """The sum is in rank order, bit for bit; half-precision dtypes accumulate in float32."""
    n, before = dist.get_world_size(), files()
    memory, generator = memory_of(n), torch.Generator().manual_seed(seed)
    for dtype in DTYPES:
        for count in (0, 1, 1000, SLOT // dtype.itemsize, 3 * SLOT // dtype.itemsize + 5):
            parts = [torch.randn(count, generator=generator, dtype=torch.float64).to(dtype) for _ in range(n)]
            total = parts[0].to(torch.float64 if dtype == torch.float64 else torch.float32)
            for part in parts[1:]:
                total = total + part
            own = parts[memory.rank].clone()
            assert memory.all_reduce(own) is own
            assert torch.equal(own, total.to(dtype)), (dtype, count)
            assert torch.equal(memory.all_reduce(parts[memory.rank].clone(), maximum=True), torch.stack(parts).amax(0))
            assert torch.equal(memory.all_gather(parts[memory.rank]), torch.stack(parts))
            sizes = [*[count // (n + 1)] * (n - 1), count - count // (n + 1) * (n - 1)]
            scattered = memory.reduce_scatter(parts[memory.rank], sizes, parts[0].new_empty(sizes[memory.rank]))
            assert torch.equal(scattered, total.to(dtype).split(sizes)[memory.rank]), (dtype, count)
    assert files() <= before  # nothing that another process could leave behind


def check_as_gloo(seed: int) -> None:
    """Through `collectives`: the same result as gloo, for contiguous and other tensors."""
    axis = ParallelMesh(dist.get_world_size()).tp
    generator = torch.Generator().manual_seed(seed + axis.rank)
    given = torch.randn(6, 8, generator=generator)
    sizes = [rank + 1 for rank in range(axis.size)]

    def compute() -> list[Tensor]:
        turned = given.clone().T
        assert all_reduce(axis, turned) is turned
        part = given[:, : sizes[axis.rank]]
        rest = [*sizes[:-1], 8 - sum(sizes[:-1])]
        scattered = [reduce_scatter(axis, x, 1, rest) for x in (given, given.T.contiguous().T)]
        largest = all_reduce(axis, given.clone(), op=dist.ReduceOp.MAX)
        return [turned, largest, gather_from(axis, part, 1, sizes), *scattered, reduce_scatter(axis, given.T, 0, rest)]

    shared = compute()
    assert isinstance(vars(axis)["memory"], SharedMemory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "shared_memory_of", lambda axis: None)
        for ours, gloos in zip(shared, compute(), strict=True):
            torch.testing.assert_close(ours, gloos, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", [2, 3, 4])
def test_shared_memory_collectives_match_gloo(pool: Pool, n: int, seed: int) -> None:
    pool.run(n, check_reductions, seed)
    pool.run(n, check_as_gloo, seed)


def check_without_compiler(folder: Path) -> None:
    """If one rank lacks the library, all ranks continue with gloo."""
    axis = ParallelMesh(2).tp
    with pytest.MonkeyPatch.context() as patch:
        if axis.rank == 1:
            build.load.cache_clear()
            patch.setenv("CXX", "")
            patch.setenv("PATH", str(folder))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            x = all_reduce(axis, torch.ones(3))
    assert any("needs a C++ compiler" in str(warning.message) for warning in told) == (axis.rank == 1)
    build.load.cache_clear()
    assert torch.equal(x, torch.full((3,), 2.0))
    assert vars(axis)["memory"] is None


def test_shared_memory_without_a_compiler_falls_back_to_gloo(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, check_without_compiler, tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        build.load.cache_clear()
        with pytest.raises(build.BuildError, match="needs a C\\+\\+ compiler"):
            build.load("shared_memory.cpp")
        build.load.cache_clear()


def test_build_error_of_a_broken_source(tmp_path: Path) -> None:
    (tmp_path / "broken.cpp").write_text("int main( {")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", tmp_path)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        with pytest.raises(build.BuildError, match="could not compile"):
            build.load("broken.cpp")
    assert list((tmp_path / "cache" / "oslo_models").iterdir()) == []


# Failures -------------------------------------------------------------------------------------------------------------


def differ(what: str) -> None:
    memory = memory_of(2)
    x = torch.ones(4, dtype=torch.float64 if what == "dtype" and memory.rank else torch.float32)
    memory.timeout = 5
    if what == "operation" and memory.rank:
        memory.all_gather(x)
    if what == "scatter" and memory.rank:
        memory.reduce_scatter(x, [2, 2], x[:2].clone())
    memory.all_reduce(x[:3] if what == "shape" and memory.rank else x)


@pytest.mark.parametrize("what", ["shape", "dtype", "operation", "scatter"])
def test_mismatched_calls_raise_peer_error(pool: Pool, what: str) -> None:
    for rank, error in enumerate(pool.run(2, differ, what, expect=PeerError)):
        assert isinstance(error, PeerError)
        assert f"rank {1 - rank} of 2 calls another operation" in str(error)


def come_late(seconds: float) -> None:
    """Waiting for a slow rank uses no CPU time; a rank that never comes is named."""
    memory = memory_of(2)
    if memory.rank == 0:
        time.sleep(seconds)
    spent = time.process_time()
    memory.all_reduce(torch.ones(1))
    assert time.process_time() - spent < 0.5 * seconds
    if memory.rank == 0:
        memory.timeout = 0.3
        with pytest.raises(PeerError, match=r"rank 1 of 2 has not come in 0.3 s, while rank 0 waited for it"):
            memory.all_reduce(torch.ones(1))
        with pytest.raises(PeerError, match="of no use after an error"):
            memory.all_reduce(torch.ones(1))
    dist.barrier()


def test_shared_memory_waits_for_a_late_rank(pool: Pool) -> None:
    pool.run(2, come_late, 0.6)


@pytest.mark.parametrize(("number", "said"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "has not come in 1 s")])
def test_killed_or_stopped_peer_raises_peer_error(number: int, said: str) -> None:
    before = files()
    memory, address = SharedMemory.create(2)
    child = os.fork()
    if child == 0:
        theirs = SharedMemory.attach(address, 1, 2)
        theirs.all_reduce(torch.ones(1))
        time.sleep(60)
        os._exit(0)
    try:
        while not memory._library.oslo_shm_alive(memory._handle, 1):  # until it has attached
            time.sleep(0.01)
        memory.all_reduce(torch.ones(1))
        memory.timeout = 1
        threading.Timer(0.3, os.kill, (child, number)).start()
        with pytest.raises(PeerError, match=f"rank 1 of 2 {said}.*, while rank 0 waited for it") as caught:
            memory.all_reduce(torch.ones(1))
        assert caught.value.position == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert files() <= before


def interrupt() -> None:
    """A rank continues to wait after a signal handler; Ctrl-C ends the wait."""
    memory = memory_of(2)
    seen: list[int] = []
    store = dist.distributed_c10d._get_default_store()
    if memory.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # the pool ignores it
        signal.signal(signal.SIGUSR2, lambda number, frame: (seen.append(number), store.set("seen", "")))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2)).start()
        memory.all_reduce(torch.ones(1))
        assert seen
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            memory.all_reduce(torch.ones(1))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    else:
        store.wait(["seen"])
        memory.all_reduce(torch.ones(1))
    dist.barrier()


def test_signals_interrupt_a_waiting_collective(pool: Pool) -> None:
    pool.run(2, interrupt)
