"""Attributes that threads compute once."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from oslo_models.locking import locked_property


class Slow:
    def __init__(self) -> None:
        self.calls = 0

    @locked_property
    def value(self) -> object:
        self.calls += 1
        time.sleep(0.05)
        return object()


def test_threads_get_one_value() -> None:
    slow, start = Slow(), threading.Barrier(4)

    def read(_: int) -> object:
        start.wait()
        return slow.value

    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(read, range(4)))
    assert len(found) == slow.calls == 1 and slow.value in found
