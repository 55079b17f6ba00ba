"""The table of the predecessors' documented promises is current, and each of its tests exists."""

from __future__ import annotations

from support.document_rows import NOT_SHOWN, PAGE, known_tests, rows, update_page


def test_every_row_is_shown_by_tests_that_exist() -> None:
    numbers = [
        f"{document}{number}"
        for document, count in zip("ABCD", (69, 13, 9, 9), strict=True)
        for number in range(1, count + 1)
    ]
    assert [*rows()] == numbers and len(numbers) == 100
    known = known_tests()
    assert not {number: wrong for number, row in rows().items() if (wrong := {*row.tests} - known)}
    assert {number for number, row in rows().items() if not row.tests} == NOT_SHOWN


def test_documentation_has_the_current_rows() -> None:
    """`make table` writes it."""
    text = PAGE.read_text()
    assert update_page(text) == text
