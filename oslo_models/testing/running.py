"""Runs a feature of the self-test on forked processes."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

TIMEOUT = 180.0
"""Time limit in seconds for the processes of a feature."""
PATIENCE = 5.0
"""Seconds for the other ranks to finish after the first error or the last result."""


@dataclass(frozen=True)
class Feature:
    """A part of the self-test.

    Attributes:
        test: runs on every rank with a directory that all ranks share; raises if the feature fails.
        ranks: the size of the process group; 0 for one process without a group.
        needs: required libraries. The feature is skipped if one is missing.
    """

    name: str
    test: Callable[[Path], None]
    ranks: int = 1
    needs: tuple[str, ...] = ()


def run_feature(feature: Feature, timeout: float = TIMEOUT) -> str:
    """Return the verdict: ``ok``, ``not installed: ...``, or ``failed: ...`` with the first error of a rank."""
    missing = [library for library in feature.needs if importlib.util.find_spec(library) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    fork = multiprocessing.get_context("fork")  # this process has imported torch but not computed: no threads run
    with tempfile.TemporaryDirectory(prefix="oslo-models-testing-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of forks beside threads of NumPy
        pairs = [fork.Pipe(duplex=False) for _ in range(feature.ranks or 1)]
        processes = [
            fork.Process(target=_run_rank, args=(feature, rank, Path(folder), writer))
            for rank, (_, writer) in enumerate(pairs)
        ]
        for process in processes:
            process.start()
        for _, writer in pairs:
            writer.close()
        errors = _receive([reader for reader, _ in pairs], timeout)
        for process in processes:
            _end(process)
    wrong = [f"rank {rank}: {error}" for rank, error in errors.items() if error]
    if wrong:
        return f"failed: {wrong[0]}"
    return "ok" if len(errors) == len(pairs) else f"failed: no result in {timeout:.0f} s"


def _receive(readers: list[Connection], timeout: float) -> dict[int, str]:
    """Return the error of each rank that answers, empty on success. Other ranks may wait for a failed rank."""
    errors: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while len(errors) < len(readers):
        waiting = [reader for rank, reader in enumerate(readers) if rank not in errors]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank, reader in enumerate(readers):
            if reader in ready:
                try:
                    errors[rank] = reader.recv()
                except EOFError:
                    errors[rank] = "the process ended without a result"
                if errors[rank]:
                    deadline = min(deadline, time.monotonic() + PATIENCE)
    return errors


def _end(process: BaseProcess) -> None:
    """Wait for a process. If it does not end, kill it and all processes that it started."""
    process.join(PATIENCE)
    if process.is_alive() and process.pid is not None:
        os.killpg(process.pid, signal.SIGKILL)
        process.join()


def _run_rank(feature: Feature, rank: int, folder: Path, writer: Connection) -> None:
    import torch
    import torch.distributed as dist
    import transformers

    os.setpgid(0, 0)
    # Keep all output out of the table; the error describes the failure.
    output = os.open(folder / f"output-{rank}.txt", os.O_WRONLY | os.O_CREAT)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(output, stream.fileno())
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if feature.ranks:
        _join_group(rank, feature.ranks, folder / "store")
    try:
        feature.test(folder)
        writer.send("")
    except Exception as error:  # noqa: BLE001  every error is a verdict
        where = traceback.extract_tb(error.__traceback__)[-1]
        first = str(error).strip().split("\n")[0]
        writer.send(f"{type(error).__name__}: {first} ({Path(where.filename).name}:{where.lineno})")
    if feature.ranks:
        dist.barrier()
        dist.destroy_process_group()


def _join_group(rank: int, ranks: int, store: Path) -> None:
    """Join a gloo process group, so that models stay on CPUs, and set the variables that accelerate expects."""
    import torch.distributed as dist

    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in launched.items()})
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=TIMEOUT)
    )
