"""Cancelling a call of a deployed model from another thread than the one that waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallCancelled(RuntimeError):
    """The call was cancelled by `Cancellation.cancel`."""


class Cancellation:
    """Passed to `Deployment.generate`, whose call `cancel` ends from any thread, before or while it is computed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []
        self.cancelled = False

    def cancel(self) -> None:
        with self._lock:
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @contextmanager
    def observed(self, callback: Callable[[], object]) -> Iterator[None]:
        """Within the block, ``callback`` is called once on `cancel`; at once if that has happened already."""
        with self._lock:
            known = self.cancelled
            if not known:
                self._callbacks.append(callback)
        if known:
            callback()
        try:
            yield
        finally:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)
