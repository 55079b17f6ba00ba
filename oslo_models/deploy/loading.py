"""Loads the model in newly started workers, with progress bars, and reports failures."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from transformers.utils.logging import is_progress_bar_enabled, tqdm

from oslo_models.deploy.errors import EngineError, exception_from
from oslo_models.deploy.messages import Failure, Join, Listening, Loading, Ready, Setup
from oslo_models.deploy.process_executor import Executor
from oslo_models.deploy.running_batch.limits import DEFAULT_LIMITS, BatchLimits

ROOT_CAUSE_SECONDS = 0.3
"""Seconds to wait, after a rank failed to load, for the death of another rank that may have caused the failure."""


def load_workers(
    executor: Executor,
    ranks: int,
    threads: int,
    make: bytes,
    receive: Callable[[float], Iterable[tuple[int, Any]]],
    directory: str | None = None,
    limits: BatchLimits = DEFAULT_LIMITS,
) -> list[str]:
    """Send every worker its setup and wait until all have loaded.

    Args:
        threads: number of torch threads of each worker.
        make: constructs the model; see `Setup`.
        receive: waits for a number of seconds. Returns the received messages with their ranks.
        directory: private to this user, if all ranks are on this host.
        limits: of the running batch.

    Returns:
        The device of each rank.

    Raises:
        EngineError: a worker died.
        Exception: a worker failed to load. The exception is the worker's.
    """
    salt = secrets.token_bytes(32)
    for rank in range(ranks):
        place = (executor.host, executor.port, directory)
        executor.send(rank, Setup(rank, ranks, threads, list(sys.path), make, *place, salt, limits))
    devices: dict[int, str] = {}
    failures: dict[int, Failure] = {}
    deadline = float("inf")
    with _ProgressBars() as bars:
        while len(devices) < ranks and time.monotonic() < deadline:
            for rank, message in receive(min(1.0, max(0.0, deadline - time.monotonic()))):
                if isinstance(message, Listening):
                    for other in range(1, ranks):
                        executor.send(other, Join(message.port))
                elif isinstance(message, Loading):
                    bars.show(rank, message)
                elif isinstance(message, Ready):
                    devices[rank] = message.device
                elif isinstance(message, Failure):
                    failures.setdefault(rank, message)
                    deadline = min(deadline, time.monotonic() + ROOT_CAUSE_SECONDS)
                elif message is None and rank not in failures:
                    raise EngineError(f"{executor.exit_reason(rank)} while the model was loaded")
    if failures:
        rank, failure = next(iter(failures.items()))
        raise exception_from(failure, rank, executor.pids[rank], "while loading")
    return [devices[rank] for rank in range(ranks)]


class _ProgressBars:
    """One bar per rank, unless transformers' progress bars are disabled. A closed terminal does not stop loading."""

    def __init__(self) -> None:
        self._bars: dict[int, Any] = {}
        self._enabled = is_progress_bar_enabled()

    def show(self, rank: int, message: Loading) -> None:
        if not self._enabled:
            return
        try:
            if rank not in self._bars:
                desc = f"Loading weights of rank {rank}"
                self._bars[rank] = tqdm(total=message.total, desc=desc, position=rank, leave=True)
            self._bars[rank].update(message.done - self._bars[rank].n)
        except (OSError, ValueError):
            self._enabled = False

    def __enter__(self) -> _ProgressBars:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError, ValueError):
            for bar in self._bars.values():
                bar.close()
