"""A barrier over the store of the process group, for ranks that arrive at very different times."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from oslo_models.distributed.failure_diagnosis import FailureDiagnosis

SLOW_TIMEOUT = 1800.0
"""Seconds to wait for a rank that is alive but reads or writes files."""


def store_barrier(watchdog: Any, axis: Any, what: str, first_status_timeout: float = 0.0) -> None:
    """Wait until all ranks of ``axis`` are here, up to `SLOW_TIMEOUT` as long as they are alive.

    Args:
        what: what this rank waits in, for the message.
        first_status_timeout: seconds to wait for a rank that has not published a status yet, if longer than the
            timeout of the axis.

    Raises:
        RankFailedError: a rank died, published nothing for the timeout of the axis, or did not come in time.
    """
    key, previous = watchdog.next_barrier(f"{axis.name} {axis.ranks[0]} {axis.ranks[-1]} {axis.size}")
    timeout, start = axis.timeout, time.monotonic()
    diagnosis = FailureDiagnosis(watchdog, axis.ranks, timeout, first_status_timeout)
    arrived, increment, pause = 0, 1, 1e-4
    answered = diagnosed = start
    # The more ranks there are, the less often each may read the statuses of all.
    longest_pause, interval = max(0.05, axis.size / 5000), max(watchdog.interval, axis.size**2 / 10_000)
    while arrived < axis.size:
        with suppress(TimeoutError):
            amount, increment = increment, 0
            arrived, answered = watchdog.ask(partial(_add, key=key, amount=amount)), time.monotonic()
        now = time.monotonic()
        if now > diagnosed + interval:
            diagnosed, failed = now, diagnosis.find_failed(timeout)
            if now > start + max(SLOW_TIMEOUT, timeout) or now > answered + timeout:
                failed = failed or diagnosis.find_absent()
            if failed:
                where = f"{what} with ranks {list(axis.ranks)} ({axis.name})"
                raise watchdog.fail(failed, where, now - start, f"timeout={timeout:g}")
        if arrived < axis.size:
            time.sleep(pause)
            pause = min(1.5 * pause, longest_pause)
    if axis.rank == 0 and previous:
        with suppress(TimeoutError):
            watchdog.ask(lambda store: store.delete_key(previous))


def _add(store: Any, key: str, amount: int) -> Any:
    return store.add(key, amount)
