"""Cases of tests with the mark ``drawn``."""

from __future__ import annotations

from typing import Any

import pytest

from support.drawn_cases import leave_cases_to_zoo


class Case:
    def __init__(self, nodeid: str, *marks: Any) -> None:
        self.nodeid, self.marks = nodeid, {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark.mark


def kept(seed: int, only: slice = slice(None)) -> list[str]:
    two, nine, zoo = pytest.mark.drawn(2), pytest.mark.drawn(9), pytest.mark.zoo
    cases: list[Any] = [Case(f"test_some[{number}]", two) for number in range(5)]
    cases += [
        Case("test_some[slow]", two, zoo),
        Case("test_few[0]", nine),
        Case("test_few[1]", nine),
        Case("test_other"),
    ]
    leave_cases_to_zoo(cases[only], seed)
    return [case.nodeid for case in cases[only] if case.get_closest_marker("zoo") is None]


def test_a_seed_keeps_so_many_cases_and_others_keep_the_others() -> None:
    found = [kept(seed) for seed in range(30)]
    assert all(len(names) == 5 and names[2:] == ["test_few[0]", "test_few[1]", "test_other"] for names in found)
    assert {name for names in found for name in names[:2]} == {f"test_some[{number}]" for number in range(5)}
    assert kept(7) == kept(7)


def test_a_case_that_is_asked_for_runs() -> None:
    assert kept(0, slice(3, 4)) == ["test_some[3]"]


def test_tests_of_a_file_are_drawn_together() -> None:
    two = pytest.mark.drawn(2, of="file")
    cases: list[Any] = [Case(f"{file}::test_{number}", two) for file in ("a.py", "b.py") for number in range(4)]
    leave_cases_to_zoo(cases, 0)
    kept = [case.nodeid.partition("::")[0] for case in cases if case.get_closest_marker("zoo") is None]
    assert sorted(kept) == ["a.py", "a.py", "b.py", "b.py"]
