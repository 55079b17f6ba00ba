"""Starts the ranks of a recipe with torch's elastic launcher, and reports the first failure once."""

from __future__ import annotations

import logging
import shutil
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from oslo_models.recipes.machines import BACKEND, Meeting, find_meeting
from oslo_models.recipes.sizes import Sizes
from oslo_models.starting import python_module


class RanksFailed(RuntimeError):
    """A rank failed. The message names it and the reason."""


class Interrupted(KeyboardInterrupt):
    """A signal ended the run.

    Attributes:
        signal: the signal.
    """

    def __init__(self, number: int) -> None:
        self.signal = signal.Signals(number)
        super().__init__(f"ended by {self.signal.name}")


def launch(module: str, arguments: Sequence[str], sizes: Sizes, endpoint: str | None, folder: Path) -> None:
    """Run ``python -m module`` on each device of this machine, and wait for all.

    The output of rank 0 appears here. Each other rank writes to files in a new folder in ``folder``, which stays if a
    rank fails.

    Raises:
        RanksFailed: a rank failed, or the machines did not meet; all ranks of this machine have ended.
        Interrupted: a signal arrived; all ranks of this machine have ended.
    """
    command, *rest = python_module(module, *arguments)
    folder.mkdir(parents=True, exist_ok=True)
    logs = mkdtemp(prefix="rank-logs-", dir=folder)
    alone = sizes.nnodes == 1
    quiet = {rank: Std.ALL for rank in range(sizes.devices) if rank or not alone}
    logs_specs = DefaultLogsSpecs(logs, redirects=quiet, tee={} if alone else {0: Std.ALL})
    meeting = Meeting(True, "127.0.0.1") if alone or endpoint is None else find_meeting(endpoint)
    config = LaunchConfig(
        min_nodes=sizes.nnodes,
        max_nodes=sizes.nnodes,
        nproc_per_node=sizes.devices,
        run_id=BACKEND,
        rdzv_backend=BACKEND,
        rdzv_endpoint=endpoint or "127.0.0.1:0",
        rdzv_configs={"is_host": meeting.is_host},
        local_addr=meeting.address,
        max_restarts=0,
        logs_specs=logs_specs,
        log_line_prefix_template="rank ${rank}: ",
    )
    try:
        with _quiet_launcher():
            elastic_launch(config, command)(*rest)
    except ChildFailedError as error:
        raise RanksFailed(_describe(*_root_cause(error.failures))) from error
    except RendezvousError as error:
        shutil.rmtree(logs, ignore_errors=True)
        raise RanksFailed(
            f"the {sizes.nnodes} machines of nnodes={sizes.nnodes} did not meet at rdzv_endpoint={endpoint}: {error} "
            "Start the same command on each, first on the machine of rdzv_endpoint"
        ) from error
    except SignalException as error:
        shutil.rmtree(logs, ignore_errors=True)
        raise Interrupted(error.sigval) from error
    shutil.rmtree(logs, ignore_errors=True)


def _root_cause(failures: dict[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first. A rank that was killed comes before the ranks that lost their connection.

    The launcher ends the others by SIGTERM after the first failure.
    """

    def order(item: tuple[int, ProcessFailure]) -> tuple[int, int]:
        _, failure = item
        if -failure.exitcode == signal.SIGTERM:
            return 3, failure.timestamp
        killed = failure.exitcode < 0
        lost = "RankFailedError" in str(failure.message)
        return 0 if killed else 2 if lost else 1, failure.timestamp

    return min(failures.items(), key=order)


def _describe(rank: int, failure: ProcessFailure) -> str:
    """Return one sentence about a failure, and where to read more."""
    more: Any = failure.message
    text = " ".join(str(more["message"] if isinstance(more, dict) else more).split())
    where = f"rank {rank} on {socket.gethostname()} (pid {failure.pid})"
    if failure.exitcode < 0:
        hint = "; the system may have run out of memory" if -failure.exitcode == signal.SIGKILL else ""
        return f"{where} was ended by {failure.signal_name()}{hint}"
    log = f"; traceback: {failure.error_file}" if Path(failure.error_file).is_file() else ""
    return f"{where} failed: {text}{log}"


@contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Silence torch's launcher, which reports a failure in dozens of lines."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)
