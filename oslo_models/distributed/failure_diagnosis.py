"""Finds failed ranks from their published statuses and, for ranks on this host, from their processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oslo_models.distributed.store_client import StoreLostError

Status = dict[str, Any]
"""Latest published status of a rank; see `Watchdog._publish`."""
_ENDED = ("died", "has ended")


class FailureDiagnosis:
    """Finds failures among ``ranks`` and among the ranks for which they wait.

    Call `find_failed` repeatedly: a rank counts as failed when its status stays unchanged for too long.

    Args:
        patience: tolerated seconds without a new status if the process is alive on this host, since the machine may be
            busy.
        first_status_timeout: seconds to wait for the first status of a rank, if longer than for later statuses.
    """

    def __init__(self, watchdog: Any, ranks: Sequence[int], patience: float, first_status_timeout: float = 0.0) -> None:
        self.watchdog, self.ranks, self.patience = watchdog, ranks, patience
        self.first_status_timeout = first_status_timeout
        self.statuses: dict[int, Status] = {}
        self._last_change: dict[int, tuple[int, float]] = {}
        self._store_silent_since: float | None = None

    @property
    def is_store_silent(self) -> bool:
        """Whether the store did not answer the last request. It may just be slow."""
        return self._store_silent_since is not None

    def find_failed(self, silence: float) -> dict[int, str]:
        """Find the ranks that died, are stopped, or published nothing for ``silence`` seconds.

        Returns:
            A description of each failed rank.
        """
        now = time.monotonic()
        try:
            self.statuses = self.watchdog.ask(lambda store: self.watchdog.read_statuses(store, self.ranks), silence)
        except StoreLostError:
            return self._without_store()
        except TimeoutError:
            self._store_silent_since = now if self._store_silent_since is None else self._store_silent_since
            if self._store_may_be_slow() and time.monotonic() - self._store_silent_since < self.patience:
                return {}
            return self._without_store()
        self._store_silent_since = None
        failed = {}
        for rank in self.statuses.keys() | set(self.ranks) - {self.watchdog.rank}:
            status = self.statuses.get(rank, {"number": 0})
            number, since = self._last_change.get(rank, (-1, now))
            if number != status["number"]:
                self._last_change[rank] = (status["number"], now)
            if status.get("failures") is not None:
                continue  # it raised because of another rank's failure
            problem, limit = _problem(status), silence
            raised = status.get("raised") and self.watchdog.is_in_call and status["call"] == self.watchdog.call
            if "pid" not in status:
                limit = max(silence, self.first_status_timeout)
            elif is_on_this_host(status) and not problem:
                limit = max(silence, self.patience)
            if raised or problem in _ENDED or now - since > limit:  # a stopped process may soon continue
                failed[rank] = _describe(rank, status, problem or ("" if raised else "has not been heard of"))
        return dict(sorted((failed or self._reported(self.statuses)).items()))

    def _reported(self, statuses: dict[int, Status]) -> dict[int, str]:
        """Return the failures that other ranks reported before they ended."""
        failures = {
            int(rank): said for status in statuses.values() for rank, said in (status["failures"] or {}).items()
        }
        failures.pop(self.watchdog.rank, None)
        return failures

    def _store_may_be_slow(self) -> bool:
        """Return whether rank 0 is known to be running. It may host the store."""
        host = self.watchdog.last_statuses.get(0)
        return self.watchdog.rank == 0 or (host is not None and is_on_this_host(host) and not _problem(host))

    def others_raised(self) -> bool:
        """Return whether other ranks raised because of a failure. This closes their connections."""
        return any(status["failures"] is not None for status in self.statuses.values())

    def find_given_up(self) -> dict[int, str]:
        """Find the ranks that raised because they waited for too long. They do not come any more."""
        return {
            rank: _describe(rank, status, "has given up waiting for other ranks")
            for rank, status in sorted(self.statuses.items())
            if status["failures"] is not None
        }

    def _without_store(self) -> dict[int, str]:
        """Find failed ranks from their last statuses if the store is lost. Rank 0 or the launcher hosts it."""
        self._store_silent_since = None
        statuses = self.watchdog.last_statuses
        if reported := self._reported(statuses):
            return reported
        failed = {
            rank: _describe(rank, status, found) for rank, status in statuses.items() if (found := _problem(status))
        }
        if 0 in failed:  # the store was lost with rank 0, and other ranks ended as a result
            return {0: failed[0]}
        if not failed and self.watchdog.rank:
            failed[0] = _describe(0, statuses.get(0, {}), "or the launcher, who has the store, has not been heard of")
        return failed

    def find_absent(self) -> dict[int, str]:
        """Find the ranks that wait for no other rank and the ranks without a running watchdog thread."""
        absent = {}
        for rank, status in sorted(self.statuses.items()):
            if status["failures"] is not None:
                continue
            if status["waiting_for"] is None:
                alive = "did not come: it is alive and waits for no rank of the model"
                absent[rank] = _describe(rank, status, _problem(status) or alive)
            elif is_on_this_host(status) and time.time() - status["time"] > self.patience:
                absent[rank] = _describe(rank, status, "has not been heard of")
        return absent


def _describe(rank: int, status: Status, problem: str) -> str:
    if "pid" not in status:
        return f"rank {rank} {problem} at all"
    if status.get("raised"):
        problem = f"{status['raised']}; it {problem}" if problem else status["raised"]
    age = max(0.0, time.time() - status["time"])
    where = f"{status['phase']}, since {status['phase_seconds']:.1f} s"
    if status["waiting_for"]:
        where += f", waiting in {status['waiting_for'][1]}"
    process = f"host {status['host']}, pid {status['pid']}"
    return f"rank {rank} ({process}) {problem}; last heard of {age:.1f} s ago, then in {where}"


def is_on_this_host(status: Status) -> bool:
    """Return whether the publisher of the status is visible in this process's PID namespace."""
    return bool(status.get("pid_namespace")) and status["pid_namespace"] == pid_namespace()


def is_unable_to_read(status: Status) -> bool:
    """Return whether the publisher of the status has ended or is stopped."""
    return bool(_problem(status))


def _problem(status: Status) -> str:
    """Describe the failure of the status's publisher; empty if the process runs or is not visible from here."""
    if status.get("exited"):
        return "has ended"
    if not is_on_this_host(status):
        return ""
    try:
        state, started = _process_state(status["pid"])
    except OSError:
        return "died"
    if state in "ZX" or started != status["start_time"]:
        return "died"
    return "is stopped (by SIGSTOP or a debugger)" if state in "Tt" else ""


def _process_state(pid: int) -> tuple[str, int]:
    """Return the state and the start time of a process on this host. The start time detects a reused process id."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[19])


def process_start_time(pid: int) -> int:
    """Return the start time of a process on this host in clock ticks since boot; 0 if unknown."""
    try:
        return _process_state(pid)[1]
    except OSError:
        return 0


def pid_namespace() -> str:
    """Return an identifier of the host and PID namespace; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
