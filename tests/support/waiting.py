"""Waits of the tests: for a condition, with a bound that only ends a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

LIMIT = 120.0
"""Seconds after which a wait counts as a hang. Machines may be busy, so no test measures them."""


def wait_until(holds: Callable[[], Any], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"still not so after {seconds:g} s"
        time.sleep(0.005)
