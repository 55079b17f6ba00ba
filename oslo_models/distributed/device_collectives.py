"""Watches collectives on GPUs. Python does not wait for them, so a failed rank raises no error there.

With NCCL a collective only queues a kernel. If another rank never arrives, this process blocks in its next
synchronisation, until torch's own watchdog ends it without naming a rank. `InFlight` names the rank earlier.
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
"""Minimum seconds by which a live rank may be late on a GPU: it may compile or load its first kernels."""
MARGIN = 60.0
"""Additional seconds until torch's watchdog ends the process as a last resort."""


@dataclass
class Collective:
    """Queued collective.

    Attributes:
        axis: the axis of the communicating ranks.
        work: torch's handle of the collective.
        what: its description for the message: ``"a sum"``.
        since: the time of queueing.
    """

    axis: Any
    work: Any
    what: str
    since: float

    def is_completed(self) -> bool:
        """Return whether the collective has completed. A failed collective has not."""
        with suppress(Exception):
            return bool(self.work.is_completed())
        return False


class InFlight:
    """The last collective of each process group. It ends after all earlier collectives."""

    def __init__(self, watchdog: Any) -> None:
        self._watchdog = watchdog
        self._last: dict[Any, Collective] = {}
        self._thread: threading.Thread | None = None

    def add(self, axis: Any, work: Any, what: str) -> None:
        """Watch a newly queued collective. The first one starts the thread."""
        self._last[axis.group] = Collective(axis, work, what, time.monotonic())
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="oslo-collectives")
            self._thread.start()

    def oldest(self) -> Collective | None:
        """Return the pending collective with the longest waiting time."""
        for group, each in list(self._last.items()):
            if each.is_completed() and self._last.get(group) is each:
                del self._last[group]
        return min(list(self._last.values()), key=lambda each: each.since, default=None)

    def join(self) -> None:
        """Wait for the thread. It ends with the watchdog."""
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
        """Record the error for the next collective and abort queued work, since this process may be waiting for it."""
        axis = collective.axis
        where = f"{collective.what} with ranks {list(axis.ranks)} ({axis.name}) on the GPU"
        error = self._watchdog.fail(failed, where, waited, f"timeout={limit:g}")
        print(f"RankFailedError: {error}", file=sys.stderr, flush=True)  # in case this process never gets there
        for group in list(self._last):
            with suppress(Exception):
                group.abort()
