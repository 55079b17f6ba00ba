"""Tables of the guides equal the rows that benchmarks have recorded."""

from __future__ import annotations

import csv
from types import ModuleType

import pytest

from benchmarks import fine_tuning, optimizer_states

from support import ROOT

PAGES = {"fine-tune": fine_tuning, "consumer-gpus": optimizer_states}


@pytest.mark.parametrize("page", PAGES)
def test_table_has_the_recorded_rows(page: str) -> None:
    benchmark: ModuleType = PAGES[page]
    with benchmark.RESULTS.open() as file:
        rows = list(csv.DictReader(file))
    assert "\n".join(benchmark.table(rows)) in (ROOT / f"docs/guides/{page}.md").read_text()
