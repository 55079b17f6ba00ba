"""The recorded accuracy of `oslo_models.estimate`."""

from __future__ import annotations

import csv

import pytest

from benchmarks.plan_accuracy import CASES, LEAST, RESULTS

with RESULTS.open() as file:
    ROWS = list(csv.DictReader(file))


@pytest.mark.parametrize("name", CASES)
def test_predicted_memory_is_within_a_tenth_of_the_measured(name: str) -> None:
    case, rows = CASES[name], [row for row in ROWS if row["model"] == name]
    expected = {(*sizes, *batch) for sizes in case.sizes for batch in case.batches}
    assert {tuple(int(row[key]) for key in ("tp", "pp", "batch", "length")) for row in rows} == expected
    counted = [row for row in rows if float(row["measured MB"]) >= LEAST]
    assert counted and all(abs(float(row["ratio"]) - 1) <= 0.1 for row in counted)
