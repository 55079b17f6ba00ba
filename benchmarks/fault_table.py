"""The rows of ``benchmarks/faults.csv``: the effect of each fault on a model, a training script or the server."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from benchmarks.records import write_rows

TABLE = Path(__file__).with_name("faults.csv")
FIGURES = ("times", "hangs", "unnamed", "aborts", "median s", "max s", "processes left")
FIELDS = ("date", "commit", "machine", "versions", "workers", "fault", *FIGURES, "refused", "wrong", "growth")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows. Each replaces the earlier row of the same fault; other rows stay."""
    kept = {row["fault"]: row for row in csv.DictReader(path.open())} if path.exists() else {}
    write_rows(path, FIELDS, (kept | {row["fault"]: row for row in rows}).values())
