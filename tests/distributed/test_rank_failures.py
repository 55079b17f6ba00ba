"""A rank that dies, stops or hangs at any point of a step: the others raise in time and name it."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from oslo_models import GPT2LMHeadModel, RankFailedError
from oslo_models.distributed import collectives, failure_diagnosis, watchdog
from oslo_models.distributed.object_exchange import gather_objects

from support import pipelines
from support.pool import Pool
from support.ports import free_port

TIMEOUT = 3.0
GLOO_TIMEOUT = 60.0
"""Timeout of gloo in seconds. Ranks have to be named earlier."""


@dataclass
class Fault:
    """Fault of one rank, at its first collective after it has noted the phase ``where``."""

    kind: str
    tp: int
    pp: int
    where: str
    victim: int = 0
    says: str = ""
    hosts: bool = False
    """Whether the ranks act as if on different hosts, and so cannot see each other's processes."""
    tcp: bool = False
    """Whether rank 0 hosts the store, as without torchrun."""
    shares: bool = False
    """Whether the last stage sends losses and logits to the other stages."""
    cp: int = 1

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.cp

    def strike(self) -> None:
        if self.kind == "hang":
            while True:
                time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


def story(fault: Fault, saved: Path, folder: Path) -> None:
    """Train, evaluate, generate and save, as a typical script does."""
    sizes = {
        "tensor_parallel_size": fault.tp,
        "pipeline_parallel_size": fault.pp,
        "context_parallel_size": fault.cp,
        "timeout": TIMEOUT,
        "share_logits": fault.shares,
    }
    model = GPT2LMHeadModel.from_pretrained_with_parallel(saved, **sizes).train()
    ids = torch.arange(2 * 7).view(2, 7)
    optimizer = torch.optim.SGD(model.gpu_parameters(), lr=0.1)
    for _ in range(2):
        model.train_batch(input_ids=ids, labels=ids)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids)
        for _ in outputs if fault.pp > 1 else ():
            pass
    model.generate(ids, max_new_tokens=4, do_sample=False, eos_token_id=None)
    model.save_pretrained_with_parallel(folder / "new", save_with_merging=fault.tp > 1)
    model.save_optimizer(optimizer, folder / "new")


def live(rank: int, fault: Fault, store: str, port: int, saved: Path, folder: Path) -> None:
    """Run one process of the gang, from its start to its end."""
    torch.set_num_threads(1)
    os.setpgid(0, 0)
    if fault.tcp:
        kind: Any = dist.TCPStore("127.0.0.1", port, fault.ranks, is_master=rank == 0, wait_for_workers=False)
    else:
        kind = dist.FileStore(store, fault.ranks)
    wait = timedelta(seconds=GLOO_TIMEOUT)
    dist.init_process_group("gloo", store=kind, rank=rank, world_size=fault.ranks, timeout=wait)
    if fault.hosts:
        watchdog.pid_namespace = failure_diagnosis.pid_namespace = lambda: f"host {rank}"
    if rank == fault.victim:
        arm(fault, lambda: (folder / "struck").write_text(str(time.time())))
    try:
        story(fault, saved, folder)
        said = {"ranks": None, "message": "finished"}
    except RankFailedError as error:
        said = {"ranks": error.ranks, "message": str(error)}
    except Exception as error:  # noqa: BLE001  it is shown by the parent
        said = {"ranks": None, "message": repr(error)}
    (folder / f"said-{rank}").write_text(json.dumps({**said, "time": time.time()}))


def arm(fault: Fault, before: Callable[[], object]) -> None:
    """Trigger the fault before a collective: before a wait, or before sharing memory without a wait."""
    wait, share = collectives.waiting.__init__, collectives.shared_memory_of

    def strike(axis: Any) -> None:
        own = axis.watchdog
        if fault.where in own._with_step(own.phase[0]):
            time.sleep(1.5 * own.interval)  # so that other ranks know its phase
            before()
            fault.strike()

    def waiting(self: Any, axis: Any, *args: Any, **kwargs: Any) -> None:
        strike(axis)
        wait(self, axis, *args, **kwargs)

    def sharing(axis: Any, *args: Any) -> Any:
        strike(axis)
        return share(axis, *args)

    collectives.waiting.__init__ = waiting  # type: ignore[method-assign]
    collectives.shared_memory_of = sharing


@dataclass
class Gang:
    """The processes of one fault."""

    fault: Fault
    folder: Path
    processes: list[Any]

    @classmethod
    def start(cls, fault: Fault, saved: Path, folder: Path) -> Gang:
        folder.mkdir()
        context = multiprocessing.get_context("forkserver")
        arguments = (fault, str(folder / "store"), free_port(), saved, folder)
        processes = [context.Process(target=live, args=(rank, *arguments), daemon=True) for rank in range(fault.ranks)]
        for process in processes:
            process.start()
        return cls(fault, folder, processes)

    def end(self) -> None:
        """Check the survivors' errors, and that the survivors end by themselves."""
        fault, deadline = self.fault, time.monotonic() + 2 * GLOO_TIMEOUT
        survivors = [rank for rank in range(fault.ranks) if rank != fault.victim]
        try:
            for rank in survivors:
                self.processes[rank].join(max(0.0, deadline - time.monotonic()))
            left = [rank for rank in survivors if self.processes[rank].is_alive()]
            assert not left, f"{fault}: ranks {left} are still there"
        finally:
            self.kill()
        assert (self.folder / "struck").exists(), f"{fault} did not happen: {self.said(survivors[0])}"
        struck = float((self.folder / "struck").read_text())
        for rank in survivors:
            said = self.said(rank)
            message = f"{asdict(fault)}, rank {rank} said:\n{said['message']}"
            assert said["ranks"] == [fault.victim], message
            assert said["message"].startswith(f"rank {fault.victim} (host "), message
            assert f"pid {self.processes[fault.victim].pid}" in said["message"], message
            assert fault.where in said["message"].splitlines()[0], message
            assert fault.says in said["message"].splitlines()[0], message
            assert said["time"] - struck < GLOO_TIMEOUT, f"{said['time'] - struck:.1f} s: {message}"

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def said(self, rank: int) -> dict[str, Any]:
        with suppress(FileNotFoundError):
            found: dict[str, Any] = json.loads((self.folder / f"said-{rank}").read_text())
            return found
        return {"ranks": None, "message": "nothing"}


SAYS = {"kill": "died", "stop": "is stopped", "hang": "did not come"}
TP = (
    "construction of GPT2LMHeadModel",
    "step 2, forward",
    "step 2, backward",
    "forward without",
    "generate",
    "saving to",
)
PP = (
    *(
        "construction",
        "step 2, forward of micro-batch 1",
        "step 2, backward of micro-batch 0",
        "step 2, end of the loop",
    ),
    *("sum of tied gradients", "step 3, forward of micro-batch 1", "step 4, generate", "saving to", "saving the optim"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "gpt2"
    GPT2LMHeadModel(pipelines.config("gpt2")).save_pretrained_with_parallel(path, save_with_merging=True)
    return path


def check(faults: list[Fault], saved: Path, folder: Path, at_once: int = 3) -> None:
    """Run a few gangs at a time: they wait more than they compute."""
    gangs: list[Gang] = []
    try:
        for number, fault in enumerate(faults):
            gangs.append(Gang.start(fault, saved, folder / str(number)))
            if len(gangs) == at_once:
                gangs.pop(0).end()
        while gangs:
            gangs.pop(0).end()
    finally:
        for gang in gangs:
            gang.kill()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("kind", ["kill", "stop"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_killed_or_stopped_rank_is_named_in_each_phase(
    pool: Pool, kind: str, tp: int, pp: int, saved: Path, tmp_path: Path, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    faults = []
    for where in TP if pp == 1 else PP if tp == 1 else PP[1:6:2]:
        victim = int(torch.randint(tp * pp, (), generator=generator))
        faults.append(Fault(kind, tp, pp, where, victim, SAYS[kind]))
    check(faults, saved, tmp_path)


@pytest.mark.parametrize("kind", ["kill", *(pytest.param(kind, marks=pytest.mark.zoo) for kind in ("stop", "hang"))])
def test_rank_that_divides_tokens_is_named(pool: Pool, kind: str, saved: Path, tmp_path: Path) -> None:
    """In an exchange of heads, and in a sum of gradients."""
    faults = [Fault(kind, 1, 1, where, 1, SAYS[kind], cp=2) for where in ("step 2, forward", "step 2, backward")]
    check(faults, saved, tmp_path)


@pytest.mark.parametrize("where", ["step 2, forward of micro-batch 1", "step 3, forward of micro-batch 1"])
def test_killed_last_stage_is_named_where_losses_are_shared(
    pool: Pool, where: str, saved: Path, tmp_path: Path
) -> None:
    """In training and in evaluation, while other stages wait for a loss."""
    check([Fault("kill", 1, 3, where, 2, SAYS["kill"], shares=True)], saved, tmp_path)


def train_with_workers(saved: Path) -> int:
    """Train with a data loader that forks; return the number of watchdog threads."""
    model = GPT2LMHeadModel.from_pretrained_with_parallel(saved, tensor_parallel_size=2).train()
    rows = [torch.arange(7) + row for row in range(4)]
    for ids in torch.utils.data.DataLoader(rows, batch_size=2, num_workers=1, multiprocessing_context="fork"):
        model.train_batch(input_ids=ids, labels=ids)
    return len([thread for thread in threading.enumerate() if thread.name == "oslo-watch"])


@pytest.mark.alone
def test_watchdog_thread_ends_with_the_process_group(pool: Pool, saved: Path) -> None:
    for _ in range(3):
        assert pool.run(2, train_with_workers, saved) == [1, 1]
        time.sleep(0.5)


def misuse(saved: Path) -> str:
    """Make two ranks wait for each other, without a failure."""
    sizes = {"tensor_parallel_size": 2, "timeout": 1}
    model = GPT2LMHeadModel.from_pretrained_with_parallel(saved, **sizes)
    x = torch.zeros(3)
    with pytest.raises(RankFailedError) as caught:
        collectives.receive(model.mesh.tp, x, 1 - model.mesh.tp.rank)
    with pytest.raises(RankFailedError):  # at once, from here on
        model.generate(torch.ones(1, 3, dtype=torch.long))
    return str(caught.value)


def test_deadlock_of_live_ranks_is_reported(pool: Pool, saved: Path) -> None:
    for message in pool.run(2, misuse, saved):
        assert "all ranks are alive and wait for each other" in message


def come_late(saved: Path) -> str:
    """Rank 1 arrives at a wait without a limit after rank 0 has given up waiting for it."""
    sizes = {"tensor_parallel_size": 2, "timeout": 1}
    tp = GPT2LMHeadModel.from_pretrained_with_parallel(saved, **sizes).mesh.tp
    tp.watchdog.set_phase("late")
    begin = time.monotonic()
    while tp.rank == 1 and time.monotonic() < begin + GLOO_TIMEOUT and not has_given_up(tp):
        time.sleep(0.1)
    with pytest.raises(RankFailedError) as caught:
        collectives.receive(tp, torch.zeros(3), 1) if tp.rank == 0 else gather_objects(tp, None)
    return str(caught.value)


def has_given_up(axis: Any) -> bool:
    statuses = axis.watchdog.ask(lambda store: axis.watchdog.read_statuses(store, [0]))
    return statuses[0]["failures"] is not None


def test_rank_does_not_wait_for_a_rank_that_has_given_up(pool: Pool, saved: Path) -> None:
    first, second = pool.run(2, come_late, saved)
    assert first.startswith("rank 1 (host") and "did not come" in first
    assert second.startswith("rank 0 (host") and "has given up waiting for other ranks" in second


def test_silent_rank_on_another_host_is_named(pool: Pool, saved: Path, tmp_path: Path) -> None:
    """Between hosts, silence is the only sign. A store falls silent with its process."""
    silent = "has not been heard of"
    check(
        [
            *(Fault(kind, 2, 1, "step 2, forward", 1, silent, hosts=True) for kind in ("kill", "stop")),
            *(Fault(kind, 1, 2, "step 2, backward", 0, silent, hosts=True, tcp=True) for kind in ("kill", "stop")),
            *(Fault(kind, 1, 2, "step 2, forward", 0, SAYS[kind], tcp=True) for kind in ("kill", "stop")),
        ],
        saved,
        tmp_path,
    )


def test_hanging_rank_is_named(pool: Pool, saved: Path, tmp_path: Path) -> None:
    """The rank is alive but makes no progress. Stages that wait for it indirectly do not name the stage between."""
    faults = [
        Fault("hang", 2, 1, "step 2, backward", 1, SAYS["hang"]),
        Fault("hang", 1, 3, "step 2, forward of micro-batch 1", 2, SAYS["hang"]),
    ]
    check(faults, saved, tmp_path)
