"""Cases of tests that are marked ``drawn(count)``: a day runs some of them, ``make test-zoo`` the others."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable

import pytest

DAYS = 14
"""Every case runs at least once in so many days with a commit."""


def leave_cases_to_zoo(items: Iterable[pytest.Item], day: int) -> None:
    """Give the cases of other days to ``zoo``, of each test that is marked ``drawn(count)``.

    The cases of a test take turns in a random but fixed order, ``count`` of them a day. With
    ``drawn(count, of="file")``, all tests of a file take turns.

    Raises:
        pytest.UsageError: a test has so many cases that their turns take more than `DAYS` days.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None and item.get_closest_marker("zoo") is None:
            end = "::" if mark.kwargs.get("of") == "file" else "["
            cases.setdefault((item.nodeid.partition(end)[0], mark.args[0]), []).append(item)
    for (name, count), found in cases.items():
        if len(found) > DAYS * count:
            raise pytest.UsageError(
                f"{name} has {len(found)} cases, of which drawn({count}) runs {DAYS * count} in {DAYS} days: "
                f"mark it drawn({-(-len(found) // DAYS)})"
            )
        order = random.Random(name).sample(range(len(found)), len(found))
        kept = {order[(day * count + turn) % len(found)] for turn in range(count)}
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.zoo)


def share_of_day(items: Iterable[pytest.Item], day: int, share: int) -> list[pytest.Item]:
    """Return one of ``share`` parts of the tests. The parts take turns by day."""
    return [item for item in items if (zlib.crc32(item.nodeid.encode()) + day) % share == 0]
