"""The recorded accuracy of `oslo_models.estimate`."""

from __future__ import annotations

import csv

from benchmarks.plan_accuracy import LEAST, MODELS, RESULTS


def test_predicted_memory_is_within_a_tenth_of_the_measured() -> None:
    with RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    assert {row["model"] for row in rows} == set(MODELS)
    assert {(row["tp"], row["pp"]) for row in rows} == {("1", "1"), ("2", "1"), ("1", "2")}
    assert all(abs(float(row["ratio"]) - 1) <= 0.1 for row in rows if float(row["measured MB"]) >= LEAST)
