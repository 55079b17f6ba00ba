"""Does every other rank name the failed rank? Faults of a training script at tp=2 x pp=2, under load.

`benchmarks.faults` runs them. One rank is killed or stopped at a random moment of one phase. Every other rank has to
end within `BOUND` seconds, with a `RankFailedError` that names that rank and no other.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.free_port import free_port
from benchmarks.gang import PHASES, Load, Server, noted

RANKS = 4
TIMEOUT = 4.0
"""Seconds that the script gives ``timeout=``."""
BOUND = 2 * TIMEOUT + 32.0
"""Maximum seconds from the fault to the end of the last rank: the timeout, the search for the failed rank, and the
shutdown of Python. The shutdown takes a second of CPU time, which is long on a machine under this load."""
SPANS = {"loading": 1.2, "forward": 0.06, "backward": 0.03, "optimizer step": 0.02, "generation": 0.3, "saving": 0.6}
"""Approximate seconds of a phase on a busy machine."""
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}


class WrongEndError(Exception):
    """Some ranks did not end with an error that names the failed rank.

    Attributes:
        ends: How every other rank ended, by its number: ``"named"``, ``"other"``, ``"abort"`` or ``"hang"``.
    """

    def __init__(self, message: str, ends: dict[int, str]) -> None:
        super().__init__(message)
        self.ends = ends


@dataclass
class Training:
    """The setup of the faults: the checkpoint, the server that forks ranks, and the load beside them.

    Attributes:
        rng: Draws the times of the faults.
        count: Number of faults so far. Ranks fail in turn, and the store is in rank 0 or in the launcher in turn.
        keep: Folder for the logs of wrong ends, or ``None``.
    """

    checkpoint: Path
    rng: random.Random
    loaded: bool = True
    keep: Path | None = None
    count: int = field(default=0, init=False)

    @cached_property
    def server(self) -> Server:
        return Server()

    @cached_property
    def load(self) -> Load:
        return Load()

    def close(self) -> None:
        for made in ("server", "load"):
            if made in self.__dict__:
                self.__dict__.pop(made).close()


@dataclass
class Gang:
    """The ranks of one fault. Rank 0 or the launcher has the store of the process group."""

    training: Training
    folder: Path
    own_store: bool

    def start(self) -> None:
        environment = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1"}
        if self.own_store:
            port = free_port()
        else:
            from torch.distributed import TCPStore

            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
            port = self.store.port
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment["MASTER_PORT"] = str(port)
        arguments = [str(self.training.checkpoint), str(self.folder), str(TIMEOUT)]
        self.pids = [
            self.training.server.start(arguments, environment | {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}, log)
            for rank, log in enumerate(self.logs)
        ]

    @property
    def logs(self) -> list[Path]:
        return [self.folder / f"log-{rank}" for rank in range(RANKS)]

    def status(self, rank: int) -> int | None:
        return self.training.server.status(self.pids[rank])

    def wait_for(self, rank: int, phase: str, times: int, seconds: float = 60.0) -> None:
        """Wait until ``rank`` has begun ``phase`` for the given number of times."""
        seen, last, deadline = 0, 0, time.monotonic() + seconds
        while seen < times:
            begun, now = noted(self.folder / f"note-{rank}")
            if begun != last:
                last, seen = begun, seen + (now == phase)
            elif time.monotonic() > deadline or self.status(rank) is not None:
                raise RuntimeError(f"rank {rank} did not get to {phase}:\n{self.logs[rank].read_text()[-3000:]}")
            time.sleep(0.0005)

    def wait(self, ranks: list[int], deadline: float) -> dict[int, int | None]:
        """The exit codes of these ranks; ``None``: still there at the deadline."""
        while None in (codes := {rank: self.status(rank) for rank in ranks}).values() and time.monotonic() < deadline:
            time.sleep(0.02)
        return codes

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            while self.status(rank) is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.005)


def end_of(code: int | None, log: str, victim: int) -> str:
    """Classify the end of a rank by its exit code and its log."""
    if code is None:
        return "hang"
    if code < 0 or "terminate called" in log:
        return "abort"
    log = re.sub(r"^\[rank\d+\]: ?", "", log, flags=re.MULTILINE)  # torch puts this before every line
    errors = re.findall(
        r"^oslo_models\.distributed\.watchdog\.RankFailedError: (.*(?:\n.*)*?)\nrank \d+ waited", log, re.MULTILINE
    )
    named = [re.match(r"rank (\d+) ", line) for line in (errors[-1].splitlines() if errors else ())]
    return "named" if code == 1 and [int(match[1]) for match in named if match] == [victim] else "other"


def one_fault(training: Training, phase: str, kind: str) -> float:
    """Make one rank fail at a random moment of ``phase``. Return the seconds until the last other rank has ended.

    Raises:
        WrongEndError: Some rank did not name the failed rank in time.
    """
    number, rng = training.count, training.rng
    training.count += 1
    victim, own_store = number % RANKS, number // RANKS % 2 == 0
    if training.loaded:
        training.load  # noqa: B018  starts it
    folder = Path(tempfile.mkdtemp(prefix="oslo-models-gang-"))
    gang = Gang(training, folder, own_store)
    gang.start()
    others = [rank for rank in range(RANKS) if rank != victim]
    try:
        times = rng.randint(1, 2) if phase in ("loading", "generation", "saving") else rng.randint(1, 6)
        pause = rng.uniform(0.0, SPANS[phase])
        gang.wait_for(victim, phase, times)
        time.sleep(pause)
        where = noted(folder / f"note-{victim}")[1]
        os.kill(gang.pids[victim], KINDS[kind])
        since = time.monotonic()
        codes = gang.wait(others, since + BOUND)
        seconds = time.monotonic() - since
        ends = {rank: end_of(codes[rank], gang.logs[rank].read_text(), victim) for rank in others}
        if set(ends.values()) != {"named"}:
            store = "rank 0" if own_store else "the launcher"
            message = f"fault {number}: rank {victim} {kind} in {where}, store in {store}: {ends}, exit codes {codes}"
            if training.keep is not None:
                for rank in others:
                    shutil.copy(gang.logs[rank], training.keep / f"{number:03}-{kind}-{phase}-{victim}-log-{rank}")
            raise WrongEndError(message, ends)
        return seconds
    finally:
        gang.kill()
        shutil.rmtree(folder)


TRAINING_FAULTS: dict[str, Callable[[Any], float]] = {
    f"rank {kind} in {phase}": partial(one_fault, phase=phase, kind=kind) for kind in KINDS for phase in PHASES
}
