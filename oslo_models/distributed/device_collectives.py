"""Watches collectives that run on GPUs, where Python does not wait for them: nothing raises there when a rank fails.

With NCCL a collective only queues a kernel. If another rank never comes, this process blocks in its next
synchronisation, until torch's own watchdog ends it without naming a rank. `InFlight` finds the rank before.
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from oslo_models.distributed.failure_diagnosis import FailureDiagnosis

DEVICE_TIMEOUT = 600.0
"""Seconds that a rank that is alive may come late on a GPU, at least: it may compile, or load its first kernels."""
MARGIN = 60.0
"""Seconds after that until torch's watchdog ends the process, if nothing else has."""


@dataclass
class Collective:
    """A collective that was queued.

    Attributes:
        axis: with whose ranks it communicates.
        work: torch's handle of it.
        what: for the message: ``"a sum"``.
        since: when it was queued.
    """

    axis: Any
    work: Any
    what: str
    since: float

    def is_completed(self) -> bool:
        """Whether it has ended; one that failed has not."""
        with suppress(Exception):
            return bool(self.work.is_completed())
        return False


class InFlight:
    """The last collective of each process group, which ends after those before it."""

    def __init__(self, watchdog: Any) -> None:
        self._watchdog = watchdog
        self._last: dict[Any, Collective] = {}
        self._thread: threading.Thread | None = None

    def add(self, axis: Any, work: Any, what: str) -> None:
        """Watch a collective that was just queued; the first one starts the thread."""
        self._last[axis.group] = Collective(axis, work, what, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="oslo-collectives")
            self._thread.start()

    def oldest(self) -> Collective | None:
        """The collective that has been waiting the longest."""
        for group, each in list(self._last.items()):
            if each.is_completed() and self._last.get(group) is each:
                del self._last[group]
        return min(list(self._last.values()), key=lambda each: each.since, default=None)

    def join(self) -> None:
        """Wait for the thread, which ends with the watchdog."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def _watch(self) -> None:
        watchdog = self._watchdog
        diagnosis: FailureDiagnosis | None = None
        watched: Collective | None = None
        while not (watchdog._exited or watchdog._is_over or watchdog.error is not None):
            time.sleep(watchdog.interval / 4)
            oldest, now = self.oldest(), time.monotonic()
            if oldest is None or now < oldest.since + 2 * watchdog.interval:
                continue
            limit = max(oldest.axis.timeout, DEVICE_TIMEOUT)
            if oldest is not watched:
                watched, diagnosis = oldest, FailureDiagnosis(watchdog, oldest.axis.ranks, limit)
            assert diagnosis is not None
            failed = diagnosis.find_failed(3 * watchdog.interval)
            if not failed and now > oldest.since + limit:
                failed = diagnosis.find_absent()
            if (failed or now > oldest.since + limit) and not oldest.is_completed():
                self._fail(oldest, failed, now - oldest.since, limit)
                return

    def _fail(self, collective: Collective, failed: dict[int, str], waited: float, limit: float) -> None:
        """Note the error, which the next collective raises, and end what is queued, which this process may wait for."""
        axis = collective.axis
        where = f"{collective.what} with ranks {list(axis.ranks)} ({axis.name}) on the GPU"
        error = self._watchdog.fail(failed, where, waited, f"timeout={limit:g}")
        print(f"RankFailedError: {error}", file=sys.stderr, flush=True)  # in case this process never gets there
        for group in list(self._last):
            with suppress(Exception):
                group.abort()
