"""Tracks the activity of every rank, so that an error names the failed rank instead of a timeout.

A thread of each process publishes its status (step, phase, current wait) to the store of the process group. When a wait
for other ranks fails, `Watchdog.explain` reads their statuses and names the ranks that died, were stopped or are
absent.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch.distributed as dist

from oslo_models.distributed.device_collectives import InFlight
from oslo_models.distributed.failure_diagnosis import (
    FailureDiagnosis,
    Status,
    is_unable_to_read,
    pid_namespace,
    process_start_time,
)
from oslo_models.distributed.store_barrier import store_barrier
from oslo_models.distributed.store_client import StoreClient, StoreLostError

TIMEOUT = 60.0
"""Default seconds to wait for other ranks."""
INTERVAL = 1.0
"""Seconds between two statuses without changes."""
MESSAGE_LENGTH = 300
"""Published characters of an error of this rank."""
STORE_LINGER = 10.0
"""Maximum seconds that rank 0 waits at its end for others to read its findings, since it may host the store."""


class RankFailedError(RuntimeError):
    """Other ranks of the model died, were stopped or did not arrive while this rank waited for them.

    The process groups are unusable afterwards: end the process and let the launcher restart all ranks.

    Attributes:
        ranks: the global ranks that failed; empty if all are alive and wait for each other.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class Watchdog:
    """Publishes the status of this process and diagnoses the others; one per process group.

    Attributes:
        step: the number of batches that the models of this process have received.
        phase: the current activity of this process and its start time.
        waiting_for: the awaited ranks, the operation and the start time; ``None`` while not waiting.
        error: the error raised by this rank, if any. The process groups are unusable afterwards.
        call: the number of the current or last call of the user's code; see `user_call`.
        raised: the error with which this rank left that call, if any.
        is_in_call: whether the call is running.
        in_flight: collectives that run on a GPU while this process continues.
        failures: failed ranks found by this rank, with a description of each.
        interval: seconds between two statuses without changes.
        last_statuses: the latest status known of each rank.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self._size = rank, size
        self.step = 0
        self.phase = ("start", time.monotonic())
        self.waiting_for: tuple[tuple[int, ...], str, float] | None = None
        self.error: RankFailedError | None = None
        self.call, self.is_in_call, self.raised = 0, False, ""
        self.failures: dict[int, str] | None = None
        self.in_flight = InFlight(self)
        self.interval = INTERVAL
        self._publisher, self._reader = (StoreClient(store, "oslo_models.distributed.watchdog") for _ in range(2))
        self.ask = self._reader.ask
        self.last_statuses: dict[int, Status] = {}
        self.world: weakref.ref[dist.ProcessGroup] | None = None
        self._store = store  # keep it alive: rank 0 may host it
        self._number, self._exited, self._wake = 0, False, threading.Event()
        self._barriers: dict[str, int] = {}
        self._process = {
            **{"pid": os.getpid(), "host": socket.gethostname()},
            **{"pid_namespace": pid_namespace(), "start_time": process_start_time(os.getpid())},
        }
        self._thread = threading.Thread(
            target=_keep_publishing, args=(weakref.ref(self),), daemon=True, name="oslo-watch"
        )
        self._thread.start()
        atexit.register(_shut_down, weakref.ref(self))
        Finalize(None, _shut_down, (weakref.ref(self),), exitpriority=0)  # children of multiprocessing skip atexit

    def attach_to(self, world: dist.ProcessGroup) -> Watchdog:
        """Record the world's process group. It keeps the store alive, and the thread ends with it."""
        self.world, self._store = weakref.ref(world), None
        return self

    @property
    def _is_over(self) -> bool:
        """Whether the process group has been destroyed. Models may outlive it."""
        return self.world is not None and (self.world() is None or self.world() is not dist.group.WORLD)

    @property
    def has_lost_store(self) -> bool:
        """Whether the process that hosts the store, rank 0 or the launcher, has ended."""
        return self._reader.lost

    def set_phase(self, phase: str) -> None:
        """Record the current activity of this process. The thread publishes it."""
        self.phase = (phase, time.monotonic())

    def limit_interval(self, timeout: float) -> None:
        """Publish often enough for ranks that wait no longer than ``timeout`` seconds."""
        self.interval = min(self.interval, max(timeout / 10, 0.05))

    def next_barrier(self, name: str) -> tuple[str, str | None]:
        """Return the store keys of the next barrier with this name and of the previous barrier, if any."""
        number = self._barriers[name] = self._barriers.get(name, 0) + 1
        return f"gate {name} {number}", f"gate {name} {number - 1}" if number > 1 else None

    # Publishing -------------------------------------------------------------------------------------------------------

    def _publish(self) -> None:
        """Publish the status of this process."""
        self._number += 1
        (phase, since), waiting_for, now = self.phase, self.waiting_for, time.monotonic()
        if waiting_for is None and (queued := self.in_flight.oldest()) is not None:
            waiting_for = (queued.axis.ranks, queued.what, queued.since)
        status = {
            **self._process,
            **{"number": self._number, "time": time.time(), "exited": self._exited},
            **{"phase": self._with_step(phase), "phase_seconds": now - since},
            "waiting_for": waiting_for and [waiting_for[0], waiting_for[1], now - waiting_for[2]],
            "failures": self.failures,
            "call": self.call,
            "raised": self.raised,
            "has_read_rank_0": self._has_read_rank_0,
        }
        self._publisher.store.set(str(self.rank), json.dumps(status))

    @property
    def _has_read_rank_0(self) -> bool:
        """Whether this rank knows the failures found by rank 0."""
        return 0 in self.last_statuses and self.last_statuses[0]["failures"] is not None

    def _with_step(self, phase: str) -> str:
        return f"step {self.step}, {phase}" if self.step else phase

    def _tick(self, last: tuple[Any, float]) -> tuple[Any, float]:
        """Publish after a change or at the end of the interval. Read rank 0 too, since the store may end with it.

        ``last`` is the last published content with its time. The return value has the same form.
        """
        news, now = (self.phase, self.error, self.raised, self._has_read_rank_0), time.monotonic()
        if news == last[0] and now < last[1] + self.interval:
            return last
        self._publish()
        if self.rank and self._publisher.store.check(["0"]):
            self.last_statuses[0] = json.loads(self._publisher.store.get("0"))
        return news, now

    # Diagnosis --------------------------------------------------------------------------------------------------------

    def read_statuses(self, store: Any, ranks: Iterable[int]) -> dict[int, Status]:
        """Read the statuses of these ranks and, transitively, of ranks that they await or report as failed."""
        statuses: dict[int, Status] = {}
        todo = [rank for rank in ranks if rank != self.rank]
        while todo:
            rank = todo.pop()
            if rank in statuses or not store.check([str(rank)]):
                continue
            statuses[rank] = status = json.loads(store.get(str(rank)))
            more = [*(status["waiting_for"] or [()])[0], *map(int, status["failures"] or ())]
            todo.extend(other for other in more if other != self.rank)
        self.last_statuses.update(statuses)
        return statuses

    def explain(self, error: Exception, axis: Any) -> Exception:
        """Return the error to raise after a wait for ``axis`` ended with ``error``: itself if no rank failed."""
        assert self.waiting_for is not None
        ranks, what, since = self.waiting_for
        waited = time.monotonic() - since
        timed_out = waited >= 0.9 * axis.timeout
        diagnosis = FailureDiagnosis(self, ranks, axis.timeout)
        deadline = time.monotonic() + 4 * self.interval
        failed = diagnosis.find_failed(3 * self.interval)
        while not failed and (diagnosis.is_store_silent or time.monotonic() < deadline):
            time.sleep(min(0.05, self.interval / 4))
            failed = diagnosis.find_failed(3 * self.interval)
        if not failed and not timed_out and not diagnosis.others_raised():
            return error
        where = f"{what} with ranks {list(ranks)} ({axis.name})"
        return self.fail(failed or diagnosis.find_absent(), where, waited, f"timeout={axis.timeout:g}; {error}")

    def fail(self, failed: dict[int, str], where: str, waited: float, cause: str) -> RankFailedError:
        """Create the error and publish it before this process ends. Others could take its end for the first failure."""
        found = "\n".join(failed.values())
        if not found and self.has_lost_store:
            found = (
                "the store of the process group is lost: the process that hosts it, the launcher or rank 0, has ended"
            )
        found = found or "all ranks are alive and wait for each other"
        mine = f"rank {self.rank} waited {waited:.1f} s in {where}, {self._with_step(self.phase[0])}; {cause}"
        error = RankFailedError(f"{found}\n{mine}", tuple(failed))
        if self.world is not None and (world := self.world()) is not None:
            self._store = world.get_group_store()  # until `_shut_down`, even if the group is destroyed earlier
        self.failures, self.error = failed, error
        deadline, number = time.monotonic() + 1.0 + 4 * self.interval, self._number
        self._wake.set()
        while self._number == number and time.monotonic() < deadline and self._thread.is_alive():
            time.sleep(0.01)
        return error

    # The end ----------------------------------------------------------------------------------------------------------

    def _wait_for_readers(self) -> None:
        """Wait until others know rank 0's findings: the store may end with rank 0, and they would blame it."""
        others = set(range(self._size)) - {0, *self.failures} if self.failures else set()
        deadline = time.monotonic() + STORE_LINGER
        while others and time.monotonic() < deadline:
            try:
                statuses = self.ask(partial(self.read_statuses, ranks=others.copy()))
            except StoreLostError:
                return
            except TimeoutError:
                continue
            unaware = {r for r, s in statuses.items() if not (s["has_read_rank_0"] or s["failures"] is not None)}
            others &= unaware
            others -= {r for r in others if is_unable_to_read(statuses[r])}
            time.sleep(0.02)

    def shut_down(self) -> None:
        """Publish the end and stop all threads. A running thread could crash the interpreter at exit."""
        self._exited = True
        self._wake.set()
        self._thread.join(1.0)
        self.in_flight.join()
        if not self._publisher.lost and not self._thread.is_alive():
            with suppress(TimeoutError):
                self._publisher.ask(lambda _: self._publish(), 0.5)
        if self.rank == 0:
            self._wait_for_readers()
        self._reader.close()
        self._publisher.close(self._thread)


class waiting:  # noqa: N801  a context manager; a class, since one made by `contextmanager` takes twice the time
    """Context manager for operations that block until other ranks arrive. Its error names the failed rank.

    Args:
        what: the operation, for the message: ``"a sum"``.
        peer: the position on the axis of the only awaited rank; by default all ranks.
        slow: the ranks may be busy with files. First wait until all have arrived, see `store_barrier`.

    Raises:
        RankFailedError: a rank died, was stopped, or did not arrive within the timeout.
    """

    __slots__ = ("axis", "peer", "slow", "what")

    def __init__(self, axis: Any, what: str, peer: int | None = None, slow: bool = False) -> None:
        self.axis, self.what, self.peer, self.slow = axis, what, peer, slow

    def __enter__(self) -> None:
        watchdog, axis = self.axis.watchdog, self.axis
        if watchdog is None:
            return
        if watchdog.error is not None:
            raise watchdog.error
        ranks = axis.ranks if self.peer is None else (axis.ranks[self.peer],)
        watchdog.waiting_for = (ranks, self.what, time.monotonic())
        if self.slow:
            store_barrier(watchdog, axis, self.what)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watchdog = self.axis.watchdog
        if watchdog is None or watchdog.waiting_for is None:
            return
        explained: BaseException | None = error
        if isinstance(error, RuntimeError) and not isinstance(error, RankFailedError):
            explained = watchdog.explain(error, self.axis)
        watchdog.waiting_for = None
        if explained is not error and explained is not None:
            raise explained from error


@contextmanager
def user_call(axis: Any) -> Iterator[None]:
    """Context manager for a call that runs code of the user on every rank, such as callbacks and datasets of a trainer.

    If the call raises on one rank, ranks that are in the same call do not wait for this rank, and raise too. All ranks
    make these calls in the same order. A nested call belongs to the outermost one.

    Raises:
        RankFailedError: the call has raised on another rank.
    """
    watchdog = axis.watchdog
    if watchdog is None or watchdog.is_in_call:
        yield
        return
    watchdog.call, watchdog.is_in_call, watchdog.raised = watchdog.call + 1, True, ""
    try:
        yield
        with waiting(axis, "the end of the call", slow=True):
            pass
    except BaseException as error:
        if not isinstance(error, RankFailedError):
            lines = str(error).splitlines() or [""]
            watchdog.raised = f"raised {type(error).__name__}: {lines[0][:MESSAGE_LENGTH]}"
        raise
    finally:
        watchdog.is_in_call = False


def _keep_publishing(ref: weakref.ref[Watchdog]) -> None:
    """Run the thread of a watchdog until the watchdog or the process group ends, or the store is lost."""
    last: tuple[Any, float] = (None, 0.0)
    while (watchdog := ref()) is not None and not watchdog._exited and not watchdog._is_over:
        with suppress(Exception):  # `explain` reports it
            try:
                last = watchdog._tick(last)
            except dist.DistNetworkError:
                watchdog._publisher.lost = True
                return
        pause, wake = watchdog.interval / 4, watchdog._wake
        del watchdog
        wake.wait(pause)
        wake.clear()


def _shut_down(ref: weakref.ref[Watchdog]) -> None:
    """Shut down at process exit. Forked children do nothing, since their exit is not the end of this rank."""
    watchdog = ref()
    if watchdog is not None and not watchdog._exited and watchdog._process["pid"] == os.getpid():
        watchdog.shut_down()


_watchdogs: weakref.WeakKeyDictionary[dist.ProcessGroup, Watchdog] = weakref.WeakKeyDictionary()


def watchdog_of_world(timeout: float, watchdog: Watchdog | None = None) -> Watchdog:
    """Return the watchdog of the world's process group: ``watchdog``, or a new one at the first call."""
    world = dist.group.WORLD
    assert world is not None
    if world not in _watchdogs:
        watchdog = watchdog or Watchdog(world.get_group_store(), dist.get_rank(), dist.get_world_size())
        _watchdogs[world] = watchdog.attach_to(world)
    _watchdogs[world].limit_interval(timeout)
    return _watchdogs[world]
