"""The rows of ``benchmarks/results.csv``."""

from __future__ import annotations

import csv
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import oslo_models

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    *("date", "commit", "machine", "versions", "case", "peer", "processes x threads", "metric", "unit"),
    *("value", "min", "max", "repeats", "ratio", "ratio to"),
)
RESULTS = Path(__file__).with_name("results.csv")
CHANGES = ("--", ".", ":!benchmarks/results*.csv", ":!docs/benchmarks.md", ":!docs/develop/gpu.md")
"""Uncommitted changes to these paths mark the commit of a measurement as dirty."""


def number(value: float) -> str:
    """Three significant digits, or all digits before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def stamp() -> dict[str, str]:
    """Return the time, machine and versions of a measurement: the first fields of its rows."""
    versions = [f"python {platform.python_version()}, oslo_models {oslo_models.__version__}"]
    for package in ("torch", "transformers", "deepspeed", "llama_cpp_python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ":?")
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"),
        "commit": _git("rev-parse", "--short", "HEAD") + ("-dirty" if _git("status", "--porcelain", *CHANGES) else ""),
        "machine": f"{cpu.split(':')[1].strip()}, {os.cpu_count()} cores",
        "versions": ", ".join(versions),
    }


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:  # there is no git
        return ""
    return done.stdout.strip()


def write_rows(path: Path, fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a CSV file by rows, after the names of the fields. Values of other fields are left out."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file, which begins with the names of the fields."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)
