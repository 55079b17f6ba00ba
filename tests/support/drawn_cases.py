"""Cases of tests that are marked ``drawn(count)``: a commit runs some of them, ``make test-zoo`` the others."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest


def leave_cases_to_zoo(items: Iterable[pytest.Item], seed: int) -> None:
    """Give the cases that the seed does not draw to ``zoo``, of each test that is marked ``drawn(count)``.

    ``drawn(count, of="file")`` draws among all tests of a file.
    """
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is not None and item.get_closest_marker("zoo") is None:
            end = "::" if mark.kwargs.get("of") == "file" else "["
            cases.setdefault((item.nodeid.partition(end)[0], mark.args[0]), []).append(item)
    for (name, count), found in cases.items():
        kept = random.Random(f"{seed} {name}").sample(range(len(found)), min(count, len(found)))
        for number, item in enumerate(found):
            if number not in kept:
                item.add_marker(pytest.mark.zoo)
