"""Turns signals into orders for the server, in order of arrival."""

from __future__ import annotations

import os
import queue
import signal
import threading
from types import FrameType

RELOAD = "reload"


class Orders:
    """Context manager that installs signal handlers. Create it in the main thread.

    The first SIGTERM or Ctrl-C ends the server after the running requests are answered; the second ends it at once.
    Before the first call of `next`, the first signal raises ``SystemExit``.

    Args:
        reloads: SIGHUP reloads the keys. Otherwise it ends the server, as a closed terminal should.
    """

    def __init__(self, reloads: bool) -> None:
        self._orders: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ending, self._loading, self._ended = False, True, threading.Event()
        handlers = dict.fromkeys((signal.SIGTERM, signal.SIGINT, signal.SIGHUP), self._end)
        handlers |= {signal.SIGHUP: self._reload} if reloads else {}
        self._previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}

    def __enter__(self) -> Orders:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _end(self, number: int, frame: FrameType | None) -> None:
        if self._ending:
            os._exit(128 + number)  # the workers exit when their connections close
        self._ending = True
        if self._loading:
            raise SystemExit(128 + number)
        self._orders.put(None)

    def _reload(self, number: int, frame: FrameType | None) -> None:
        self._orders.put(RELOAD)

    def give_up(self, reason: str) -> None:
        """End the server for this reason. Callable from any thread."""
        self._orders.put(reason)

    def server_ended(self) -> None:
        """Report that the server has stopped listening. Callable from any thread."""
        self._ended.set()
        self._orders.put("the server has ended by itself")

    def next(self) -> str | None:
        """Wait for an order: `RELOAD`, ``None`` for a regular end, or the reason for an end with an error."""
        self._loading = False
        return self._orders.get()

    def wait_for_server(self, seconds: float) -> None:
        """Wait until the server has ended, but at most ``seconds``."""
        self._ended.wait(seconds)
