"""Cancels a call of a deployed model from another thread than the waiting thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class CallCancelled(RuntimeError):
    """The call was cancelled by `Cancellation.cancel`."""


class Cancellation:
    """Handle passed to `Deployment.generate`. `cancel` ends the call from any thread, before or during computation."""

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
        """Context in which `cancel` calls ``callback`` once. If already cancelled, calls it at once."""
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
