"""Failure diagnosis: survivors name the rank that failed first, in situations met by `benchmarks.training_faults`."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from oslo_models import GPT2LMHeadModel, RankFailedError
from oslo_models.distributed import collectives, device_collectives, failure_diagnosis, mesh
from oslo_models.distributed.device_collectives import InFlight
from oslo_models.distributed.failure_diagnosis import FailureDiagnosis, pid_namespace, process_start_time
from oslo_models.distributed.mesh import ParallelMesh, world_axis
from oslo_models.distributed.store_barrier import store_barrier
from oslo_models.distributed.store_client import StoreClient, StoreLostError
from oslo_models.distributed.watchdog import Watchdog

from support.faults import CONFIG, Training, end_of, one_fault
from support.pool import Pool
from support.ports import free_port
from support.waiting import LIMIT, wait_until

pytestmark = pytest.mark.drawn(8, of="file")

VICTIM = 2


def live(rank: int, story: Callable[..., Any], port: int, folder: Path, *args: Any) -> None:
    """Run one of three ranks while one fails; write the ranks that its error names, or another outcome."""
    torch.set_num_threads(1)
    said: Any = "nothing was raised"
    try:
        story(rank, port, *args)
    except RankFailedError as error:
        said = list(error.ranks)
    except Exception as error:  # noqa: BLE001  shown by the test
        said = repr(error)
    finally:
        (folder / str(rank)).write_text(json.dumps(said))


def survivors_say(folder: Path, story: Callable[..., Any], *args: Any, seconds: float = LIMIT) -> list[Any]:
    port = free_port()
    context: Any = multiprocessing.get_context("forkserver")
    gang = [context.Process(target=live, args=(rank, story, port, folder, *args), daemon=True) for rank in range(3)]
    try:
        for process in gang:
            process.start()
        deadline = time.monotonic() + seconds
        for process in gang:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        for process in gang:
            process.kill()
            process.join()
    assert not (folder / str(VICTIM)).exists(), "it did not die"
    found = []
    for rank in range(VICTIM):
        path = folder / str(rank)
        found.append(json.loads(path.read_text()) if path.exists() else "it hangs")
    return found


def make_mesh(rank: int, port: int, moment: str) -> None:
    """Make a mesh as in a launcher's script; one rank dies between the rendezvous and the connections."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3")

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == VICTIM:
        setattr(dist, moment, die)
    ParallelMesh(1, 3, timeout=2.0)


@pytest.mark.parametrize("moment", ["init_process_group", "new_group"])
def test_rank_killed_while_groups_are_made_is_named(pool: Pool, tmp_path: Path, moment: str) -> None:
    """Here gloo raises ``Gloo connectFullMesh failed`` or ``wait timeout after`` without a rank, or waits on."""
    assert survivors_say(tmp_path, make_mesh, moment) == [[VICTIM], [VICTIM]]


def wait_in_turn(rank: int, port: int, destroys: bool) -> None:
    """Rank 0, the host of the store, finds the failure and ends; rank 1 looks for it afterwards."""
    store = TCPStore("127.0.0.1", port, 3, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=20))
    axis = world_axis(1.5)
    del store
    time.sleep([0.0, 4.0, 0.5][rank])
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        collectives.receive(axis, torch.zeros(3), VICTIM if rank == 0 else 0)
    finally:
        if destroys:
            dist.destroy_process_group()


@pytest.mark.parametrize("destroys", [False, True], ids=["ends", "destroys its group and ends"])
def test_failed_rank_is_named_after_the_store_has_ended(pool: Pool, tmp_path: Path, destroys: bool) -> None:
    assert survivors_say(tmp_path, wait_in_turn, destroys) == [[VICTIM], [VICTIM]]


class OnAGPU(torch.Tensor):
    """Tensor that claims to be on a GPU."""

    is_cpu, is_cuda = False, True  # type: ignore[assignment]


class Stalled:
    """Counter of a stream that is stuck in its first collective."""

    def __init__(self, device: torch.device) -> None:
        pass

    def write(self) -> None:
        """Queue a mark behind the collective."""

    def expect(self) -> int:
        return 1

    def completed(self) -> int:
        return 0


class Queued:
    """Stand-in for NCCL's work handle and group: calls return at once.

    Args:
        failed: the collective has failed. torch calls it completed then, and ends the process a minute later.

    Attributes:
        aborted: whether `abort` was called.
        queried: threads that asked for the state of the work. A query of an event breaks a capture in another thread.
    """

    def __init__(self, failed: bool = False) -> None:
        self.aborted, self.failed = False, failed
        self.queried: list[str] = []

    def is_completed(self) -> bool:
        self.queried.append(threading.current_thread().name)
        return self.failed

    def wait(self) -> None:
        """Return at once: NCCL waits on the device."""

    def abort(self) -> None:
        self.aborted = True


def queue_sums(rank: int, port: int, kind: str, survivors: list[str]) -> None:
    """The victim dies or never comes; other ranks go on in Python, as with NCCL, to the next all-reduce."""
    store = TCPStore("127.0.0.1", port, 3, is_master=rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=20))
    device_collectives.DEVICE_TIMEOUT, InFlight.progress_type = 2.0, Stalled
    queued, x = Queued(failed=kind == "failed"), torch.ones(2).as_subclass(OnAGPU)
    axis: Any = replace(world_axis(1.5), group=queued)  # type: ignore[arg-type]
    if rank == VICTIM:
        time.sleep(1.0)
        while kind == "did not come" and not all(map(os.path.exists, survivors)):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    torch.cuda.is_current_stream_capturing = lambda: False  # torch without CUDA lacks it
    dist.all_reduce = lambda *args, **kwargs: queued
    collectives.start_all_reduce(axis, x).wait()
    while not queued.aborted:  # as in a synchronisation with the device
        time.sleep(0.05)
    assert not queued.queried, queued.queried
    collectives.all_reduce(axis, x)


@pytest.mark.parametrize("kind", ["died", "did not come", "failed"])
def test_rank_is_named_while_a_sum_is_queued_on_a_gpu(pool: Pool, tmp_path: Path, kind: str) -> None:
    """The error comes before torch's watchdog ends the process without naming a rank.

    The stand-ins do not show that a stream of a GPU writes to host memory, or that it stops at a failed collective.
    """
    survivors = [str(tmp_path / str(rank)) for rank in range(VICTIM)]
    assert survivors_say(tmp_path, queue_sums, kind, survivors) == [[VICTIM], [VICTIM]]


def connect_axes(rank: int, port: int, moment: str) -> None:
    """Make a mesh as with NCCL: groups have long timeouts, and connect in their first collective.

    One rank dies while the process imports, or in its first collective. In NCCL, the others then wait in the store.
    """
    os.environ.update(RANK=str(rank), WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="3")
    mesh.is_lazy, mesh._group_timeout, InFlight.progress_type = lambda device: True, lambda timeout: 600.0, Stalled
    watchdogs: list[Any] = []

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def first_collective(*_: Any, **__: Any) -> None:
        deadline = time.monotonic() + LIMIT
        while time.monotonic() < deadline and watchdogs[0].error is None:
            time.sleep(0.05)
        raise RuntimeError("NCCL communicator was aborted")

    if rank == VICTIM and moment == "before":
        mesh.meet = die
    dist.all_reduce = die if rank == VICTIM else first_collective
    dist.send = dist.recv = lambda *_, **__: None
    find = mesh.world_axis
    mesh.world_axis = lambda timeout: watchdogs.append((axis := find(timeout)).watchdog) or axis  # type: ignore[func-returns-value]
    ParallelMesh(3, 1, timeout=2.0)


@pytest.mark.parametrize("moment", ["before", "in"])
def test_rank_that_dies_before_its_first_collective_on_gpus_is_named(pool: Pool, tmp_path: Path, moment: str) -> None:
    """Without a meeting, other ranks would wait for NCCL's connection for up to half an hour."""
    assert survivors_say(tmp_path, connect_axes, moment) == [[VICTIM], [VICTIM]]


def connected_axes() -> list[str]:
    names: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mesh, "is_lazy", lambda device: True)
        patch.setattr(mesh, "connect", lambda axis, device, messages=False: names.append(axis.name))
        ParallelMesh(1, 2)
    return names


def test_each_axis_connects_on_gpus(pool: Pool) -> None:
    """The world too: recipes and the comparison of arguments communicate through it."""
    assert pool.run(2, connected_axes) == [["world", "pp", "pp_back"]] * 2


def test_groups_with_nccl_wait_longer_than_the_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    for backends, seconds in (("cpu:gloo,cuda:nccl", 660.0), ("cpu:gloo,cuda:gloo", 60.0)):
        monkeypatch.setattr(dist, "get_backend_config", lambda backends=backends: backends)
        assert mesh._group_timeout(60.0) == seconds


def host_store(conn: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    conn.send(store.port)
    time.sleep(60)


def is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_store_client_thread_can_be_ended_while_the_store_is_stopped(pool: Pool) -> None:
    """A thread that returns from C++ during interpreter finalization would abort the process."""
    context: Any = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    host = context.Process(target=host_store, args=(theirs,), daemon=True)
    host.start()
    try:
        store = TCPStore("127.0.0.1", ours.recv(), is_master=False)
        stopped, killed = StoreClient(store, "a"), StoreClient(store, "b")
        assert stopped.ask(lambda store: store.add("x", 1)) == killed.ask(lambda store: store.add("y", 1)) == 1
        os.kill(host.pid, signal.SIGSTOP)
        wait_until(lambda: all(is_stopped(task) for task in Path(f"/proc/{host.pid}/task").iterdir()))
        with pytest.raises(TimeoutError, match="does not answer"):
            stopped.ask(lambda store: store.check(["x"]), 0.2)
        stopped.close()
        assert not stopped._thread.is_alive() and not killed.lost
        host.kill()
        host.join()
        since = time.monotonic()
        for _ in range(3):  # at once, and without a stack trace of C++ for each
            with pytest.raises(StoreLostError):
                killed.ask(lambda store: store.check(["x"]), LIMIT)
        assert time.monotonic() - since < LIMIT
        killed.close()
        assert not killed._thread.is_alive()
    finally:
        host.kill()
        host.join()


def test_the_store_answers_while_the_interpreter_shuts_down() -> None:
    """The watchdog publishes its last status then, and Python 3.12 and later start no threads at that point."""
    code = """
import atexit
from torch.distributed import TCPStore
from oslo_models.distributed.store_client import StoreClient
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = StoreClient(store, "a")
atexit.register(lambda: (print("answer", client.ask(lambda store: store.add("x", 1))), client.close()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["answer", "1"] and "Traceback" not in done.stderr, done.stdout + done.stderr


@pytest.mark.parametrize("is_lost", [True, False])
def test_barrier_without_news_ends(is_lost: bool) -> None:
    """The launcher has ended with the store, or the store stays silent for longer than the timeout."""

    def ask(request: Any, seconds: float = 2.0) -> Any:
        raise StoreLostError if is_lost else TimeoutError

    store = dist.HashStore()
    watchdog = Watchdog(store, 0, 2)
    try:
        watchdog.ask, watchdog._reader.lost = ask, is_lost
        axis = SimpleNamespace(ranks=(0, 1), size=2, rank=0, name="world", timeout=0.3)
        said = "store of the process group is lost" if is_lost else "wait for each other"
        with pytest.raises(RankFailedError, match=said):
            store_barrier(watchdog, axis, "saving", limit=0.3)
    finally:
        watchdog.shut_down()


class Silent:
    """Watchdog of rank 1 with a store that never answers, or always answers the same."""

    def __init__(self, posts: dict[int, Any], answers: bool) -> None:
        self.rank, self.last_statuses, self.answers = 1, posts, answers

    def ask(self, question: Any, seconds: float) -> Any:
        if not self.answers:
            raise TimeoutError
        return self.last_statuses


def post(**changes: Any) -> dict[str, Any]:
    pid = os.getpid()
    process = {"pid": pid, "start_time": process_start_time(pid), "pid_namespace": pid_namespace(), "host": "n1"}
    said = {"number": 1, "time": time.time(), "exited": False, "phase": "step 1", "phase_seconds": 0.0}
    return {**process, **said, "waiting_for": None, "failures": None, "has_read_rank_0": False, **changes}


@pytest.mark.parametrize("answers", [True, False])
def test_late_post_of_a_live_process_is_no_failure(answers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A visibly live process is not blamed for a late post, or for a late answer of its store."""
    clock = SimpleNamespace(now=time.monotonic(), time=time.time)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(failure_diagnosis, "time", clock)
    diagnosis = FailureDiagnosis(Silent({0: post()}, answers), (0,), patience=0.4)
    assert diagnosis.find_failed(0.01) == {}
    clock.now += 0.1
    assert diagnosis.find_failed(0.01) == {}
    clock.now += 0.4
    assert list(diagnosis.find_failed(0.01)) == [0]


def test_stopped_process_is_diagnosed_as_failed(pool: Pool) -> None:
    """The process is visible like a live process, and is blamed sooner."""
    context: Any = multiprocessing.get_context("forkserver")
    process = context.Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    try:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(Path(f"/proc/{process.pid}")))
        diagnosis = FailureDiagnosis(
            Silent({0: post(pid=process.pid, start_time=process_start_time(process.pid))}, True), (0,), patience=60.0
        )
        diagnosis.find_failed(0.01)
        time.sleep(0.1)
        assert "is stopped" in diagnosis.find_failed(0.01)[0]
    finally:
        process.kill()
        process.join()


def test_diagnoses_of_other_ranks_are_adopted() -> None:
    """A rank that ended because of a failure is not named in its place, with or without a store."""
    dead = {"pid": 2**22 + 1, "start_time": 1}
    told = Silent({0: post(**dead, failures={"3": "rank 3 died"}), 2: post(**dead)}, answers=False)
    assert FailureDiagnosis(told, (2,), 0.0).find_failed(0.0) == {3: "rank 3 died"}
    untold = Silent({0: post(**dead), 2: post(**dead)}, answers=False)
    assert list(FailureDiagnosis(untold, (2,), 0.0).find_failed(0.0)) == [0]
    hidden = Silent({2: post(failures={"3": "rank 3 died"}), 3: post(pid_namespace="elsewhere")}, answers=True)
    assert FailureDiagnosis(hidden, (2,), 10.0).find_failed(10.0) == {3: "rank 3 died"}


def test_training_script_names_a_killed_rank(tmp_path: Path, seed: int) -> None:
    """Once; ``python -m benchmarks.faults --only "rank "`` does it many times, in each phase."""
    GPT2LMHeadModel(CONFIG).save_pretrained(tmp_path / "checkpoint")
    training = Training(tmp_path / "checkpoint", random.Random(seed), loaded=False, keep=tmp_path)
    training.count = seed % 8
    try:
        one_fault(training, "loading", "killed")
    finally:
        training.close()


def test_end_of_classifies_the_output_of_a_rank() -> None:
    named = "[rank1]: oslo_models.distributed.watchdog.RankFailedError: rank 2 (host n1, pid 3) died\n"
    named += "[rank1]: rank 1 waited 1 s\n"
    assert end_of(1, named, 2) == "named"
    assert end_of(1, named, 3) == end_of(0, named, 2) == end_of(1, "RuntimeError", 2) == "other"
    assert end_of(1, named.replace("died", "died\n[rank1]: rank 0 (host n1, pid 4) died"), 2) == "other"
    assert end_of(-6, named, 2) == end_of(1, named + "terminate called", 2) == "abort"
    assert end_of(None, named, 2) == "hang"
