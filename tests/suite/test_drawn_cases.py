"""Cases of tests with the mark ``drawn``, and shares of tests."""

from __future__ import annotations

from typing import Any

import pytest

from support.drawn_cases import DAYS, leave_cases_to_zoo, share_of_day


class Case:
    def __init__(self, nodeid: str, *marks: Any) -> None:
        self.nodeid, self.marks = nodeid, {mark.name: mark.mark for mark in marks}

    def get_closest_marker(self, name: str) -> Any:
        return self.marks.get(name)

    def add_marker(self, mark: Any) -> None:
        self.marks[mark.name] = mark.mark


def kept(day: int, cases: list[Any]) -> list[str]:
    leave_cases_to_zoo(cases, day)
    return [case.nodeid for case in cases if case.get_closest_marker("zoo") is None]


def cases_of_two_tests() -> list[Any]:
    two, nine, zoo = pytest.mark.drawn(2), pytest.mark.drawn(9), pytest.mark.zoo
    return [
        *(Case(f"test_some[{number}]", two) for number in range(5)),
        Case("test_some[slow]", two, zoo),
        Case("test_few[0]", nine),
        Case("test_few[1]", nine),
        Case("test_other"),
    ]


def test_a_day_keeps_so_many_cases_and_others_keep_the_others() -> None:
    found = [kept(day, cases_of_two_tests()) for day in range(30)]
    assert all(len(names) == 5 and names[2:] == ["test_few[0]", "test_few[1]", "test_other"] for names in found)
    for first in range(27):  # five cases, two a day: three days reach all
        names = {name for names in found[first : first + 3] for name in names[:2]}
        assert names == {f"test_some[{number}]" for number in range(5)}
    assert kept(7, cases_of_two_tests()) == kept(7, cases_of_two_tests())


@pytest.mark.parametrize(("count", "number"), [(1, 14), (2, 27), (55, 750), (60, 750), (3, 42), (9, 10)])
def test_every_case_runs_within_fourteen_days(count: int, number: int) -> None:
    for first in (0, 20783, 20790):
        found: set[str] = set()
        for day in range(first, first + DAYS):
            found.update(kept(day, [Case(f"test_some[{each}]", pytest.mark.drawn(count)) for each in range(number)]))
        assert len(found) == number


def test_cases_that_do_not_fit_into_fourteen_days_are_refused() -> None:
    cases: list[Any] = [Case(f"test_some[{each}]", pytest.mark.drawn(2)) for each in range(29)]
    with pytest.raises(pytest.UsageError, match=r"29 cases.*mark it drawn\(3\)"):
        leave_cases_to_zoo(cases, 0)


def test_a_case_that_is_asked_for_runs() -> None:
    assert kept(0, cases_of_two_tests()[3:4]) == ["test_some[3]"]


def test_tests_of_a_file_are_drawn_together() -> None:
    two = pytest.mark.drawn(2, of="file")
    cases: list[Any] = [Case(f"{file}::test_{number}", two) for file in ("a.py", "b.py") for number in range(4)]
    assert sorted(name.partition("::")[0] for name in kept(0, cases)) == ["a.py", "a.py", "b.py", "b.py"]


def test_shares_take_turns() -> None:
    cases: list[Any] = [Case(f"test_some[{each}]") for each in range(200)]
    shares = [[case.nodeid for case in share_of_day(cases, day, 4)] for day in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(case.nodeid for case in cases)
    assert all(30 < len(share) < 70 for share in shares)
