"""A barrier over the store of the process group, for ranks that arrive at very different times."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from typing import Any

from oslo_models.distributed.failure_diagnosis import FailureDiagnosis

SLOW_TIMEOUT = 1800.0
"""Seconds to wait for a rank that is alive but reads or writes files."""


class SlowWait:
    """Monitors a wait for the ranks of ``axis``, up to `SLOW_TIMEOUT` while they are alive.

    Args:
        what: the operation, for the message.
        first_status_timeout: seconds to wait for the first status of a rank, if longer than the timeout of the axis.
        limit: seconds to wait for a live rank, if longer than the timeout of the axis.

    Attributes:
        answered: the time of the last news about arrived ranks.
    """

    def __init__(
        self,
        watchdog: Any,
        axis: Any,
        what: str,
        first_status_timeout: float = 0.0,
        limit: float = SLOW_TIMEOUT,
    ) -> None:
        self._watchdog, self._axis, self._what, self._limit = watchdog, axis, what, max(limit, axis.timeout)
        self._diagnosis = FailureDiagnosis(watchdog, axis.ranks, axis.timeout, first_status_timeout)
        self._start = self._diagnosed = self.answered = time.monotonic()

    def check(self) -> None:
        """Diagnose the ranks, unless the last diagnosis is recent.

        Raises:
            RankFailedError: a rank died, published nothing for the timeout of the axis, or did not arrive in time; or
                the store is lost.
        """
        axis, now = self._axis, time.monotonic()
        # The more ranks there are, the less often each may read the statuses of all.
        if now <= self._diagnosed + max(self._watchdog.interval, axis.size**2 / 10_000):
            return
        self._diagnosed, failed = now, self._diagnosis.find_failed(axis.timeout)
        is_over = now > self._start + self._limit or now > self.answered + axis.timeout
        if is_over:
            failed = failed or self._diagnosis.find_absent()
        failed = failed or self._diagnosis.find_given_up()
        if failed or is_over or self._watchdog.has_lost_store:
            where = f"{self._what} with ranks {list(axis.ranks)} ({axis.name})"
            raise self._watchdog.fail(failed, where, now - self._start, f"timeout={axis.timeout:g}")


def store_barrier(
    watchdog: Any, axis: Any, what: str, first_status_timeout: float = 0.0, limit: float = SLOW_TIMEOUT
) -> None:
    """Wait until all ranks of ``axis`` have arrived. See `SlowWait` for arguments and errors."""
    key, previous = watchdog.next_barrier(f"{axis.name} {axis.ranks[0]} {axis.ranks[-1]} {axis.size}")
    wait = SlowWait(watchdog, axis, what, first_status_timeout, limit)
    arrived, increment, pause = 0, 1, 1e-4
    longest_pause = max(0.05, axis.size / 5000)
    while arrived < axis.size:
        with suppress(TimeoutError):
            amount, increment = increment, 0
            arrived, wait.answered = watchdog.ask(partial(_add, key=key, amount=amount)), time.monotonic()
        wait.check()
        if arrived < axis.size:
            time.sleep(pause)
            pause = min(1.5 * pause, longest_pause)
    if axis.rank == 0 and previous:
        with suppress(TimeoutError):
            watchdog.ask(lambda store: store.delete_key(previous))


def _add(store: Any, key: str, amount: int) -> Any:
    return store.add(key, amount)
