"""Watches collectives on GPUs. Python does not wait for them, so a failed rank raises no error there.

With NCCL a collective only queues a kernel. If another rank never arrives, this process blocks in its next
synchronisation, until torch's own watchdog ends it without naming a rank. `InFlight` names the rank earlier.

The stream itself reports its progress: after each collective it increments a counter and copies it to host memory. The
watching thread reads this memory only. A call of CUDA or of a torch ``Work`` could break a stream capture in another
thread, could block while it holds the interpreter lock, and takes a failed collective for a completed one.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import torch

from oslo_models.distributed.failure_diagnosis import FailureDiagnosis

DEVICE_TIMEOUT = 600.0
"""Minimum seconds by which a live rank may be late on a GPU: it may compile or load its first kernels."""
MARGIN = 60.0
"""Additional seconds until torch's watchdog ends the process as a last resort."""
T = TypeVar("T")


class Progress:
    """Counter of the completed marks of a stream: in device memory, with a copy in host memory.

    Create it outside of a stream capture.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # otherwise no other mode may increment it
            self._on_device = torch.zeros(1, dtype=torch.int64, device=device)
            self._on_host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._word = ctypes.c_int64.from_address(self._on_host.data_ptr())
        self._marks = count(1)

    def write(self) -> None:
        """Queue a mark on the current stream. A capture records it, so each replay of the graph queues it."""
        self._on_device.add_(1)
        self._on_host.copy_(self._on_device, non_blocking=True)

    def expect(self) -> int:
        """Return the number of the latest mark. Call it once per queued mark, replayed marks included."""
        return next(self._marks)

    def completed(self) -> int:
        """Return the number of the last completed mark, without a call of CUDA."""
        return self._word.value


@dataclass(eq=False)
class Collective:
    """Collective that a stream runs.

    Attributes:
        axis: the axis of the communicating ranks.
        what: its description for the message: ``"a sum"``.
        since: the time of the call.
        progress: the counter of its stream.
        mark: the number of the mark after it; ``None`` during the call, which may connect to other ranks.
    """

    axis: Any
    what: str
    since: float
    progress: Any
    mark: int | None = None

    def is_completed(self) -> bool:
        """Return whether the stream has passed the collective. It passes no failed collective."""
        return self.mark is not None and self.progress.completed() >= self.mark


class InFlight:
    """The last collective of each process group. It ends after all earlier collectives.

    Attributes:
        progress_type: creates the counter of a device's stream.
    """

    progress_type: Callable[[torch.device], Any] = Progress

    def __init__(self, watchdog: Any) -> None:
        self._watchdog = watchdog
        self._last: dict[Any, Collective] = {}
        self._progress: dict[tuple[torch.device, int], Any] = {}
        self._thread: threading.Thread | None = None

    def queue(self, axis: Any, what: str, device: torch.device, call: Callable[[], T]) -> T:
        """Call a function that queues a collective on the current stream. Watch the collective from now on."""
        key = device, _stream(device)
        progress = self._progress.get(key)
        if progress is None:
            progress = self._progress[key] = self.progress_type(device)
        collective, found = self._begin(axis, what, progress, call)
        progress.write()
        collective.mark = progress.expect()
        return found

    def replay(self, axis: Any, what: str, progress: Any, call: Callable[[], T]) -> T:
        """Replay a CUDA graph that ends with a mark of ``progress``. Watch its collectives from now on."""
        collective, found = self._begin(axis, what, progress, call)
        collective.mark = progress.expect()
        return found

    def connect(self, axis: Any, what: str, call: Callable[[], T]) -> T:
        """Watch a call only: it may connect to other ranks, but the current stream does not wait for the result."""
        before = self._last.get(axis.group)
        collective, found = self._begin(axis, what, None, call)
        self._end(collective, before)
        return found

    def _begin(self, axis: Any, what: str, progress: Any, call: Callable[[], T]) -> tuple[Collective, T]:
        before = self._last.get(axis.group)
        collective = self._last[axis.group] = Collective(axis, what, time.monotonic(), progress)
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, daemon=True, name="oslo-collectives")
            self._thread.start()
        try:
            return collective, call()
        except BaseException:
            self._end(collective, before)
            raise

    def _end(self, collective: Collective, before: Collective | None) -> None:
        """Stop watching a call. Watch the collective before it again."""
        group = collective.axis.group
        if self._last.get(group) is collective:
            del self._last[group]
            if before is not None:
                self._last[group] = before

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


def _stream(device: torch.device) -> int:
    """Return the current stream of a GPU, as an integer; 0 on other devices, which have none."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def watched_steps(call: Callable[..., T], axis: Any, device: torch.device) -> Callable[..., T]:
    """Return a compiled step that marks its end. The step itself watches none of its collectives."""
    if axis.size == 1 or axis.watchdog is None or device.type != "cuda":
        return call

    def step(*args: Any, **kwargs: Any) -> T:
        found = call(*args, **kwargs)
        axis.watchdog.in_flight.queue(axis, "a compiled step", device, lambda: None)
        return found

    return step
