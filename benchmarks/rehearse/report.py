"""Readable rows: lines during the measurement, a summary, and the committed table of the documentation."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.records import number
from benchmarks.rehearse.cases import PARTS, QUESTIONS, ROOT, Case, Question

RESULTS = ROOT / "benchmarks" / "results-gpu.csv"
PAGE = ROOT / "docs" / "develop" / "gpu.md"
BEGIN, END = "<!-- rehearsal:begin -->", "<!-- rehearsal:end -->"
FIELDS = ("date", "commit", "machine", "versions", "part", "case", "peer", "metric", "value", "unit", "target", "state",
          "error")  # fmt: skip
MISSING = ("not finished", "not run")
SMALLER_IS_BETTER = ("us", "ms", "s", "MB")
RIVALS = {
    "training": ("transformers compiled", 1.0, ("llama-1b", "training")),
    "decoding": ("transformers", 4.0, ("llama-1b, batch 1", "prompt 32, generation")),
}
"""By part: the rival, the target of a fused model in multiples of its speed, and the case and metric."""
Row = dict[str, Any]


def line(row: Row) -> str:
    """One row on one line."""
    start = f"{row['at']:6.1f}  {row['case']:48}"
    if row["state"] == "done":
        return f"{start}done after {row['seconds']} s"
    value = "" if row.get("value") is None else f"{number(row['value'])} {row['unit']}"
    return f"{start}{row.get('peer', ''):32}{row.get('metric', ''):34}{value:>18}  {_verdict(row)}".rstrip()


def _verdict(row: Row) -> str:
    if row["state"] != "measured":
        return f"{row['state'].upper()} {_last_line(row.get('error', ''))}"
    return "" if row.get("target") is None else f"target {number(row['target'])}: {'met' if met(row) else 'MISSED'}"


def _last_line(error: str) -> str:
    return next((text.strip()[:160] for text in reversed(error.splitlines()) if text.strip()), "")


def met(row: Row) -> bool:
    """Whether a figure reaches its target."""
    if row["unit"] in SMALLER_IS_BETTER:
        return bool(row["value"] <= row["target"])
    return bool(row["value"] >= row["target"])


def rows_of(folder: Path, parts: Sequence[str] = PARTS) -> list[Row]:
    """The rows of a folder, as far as they were written."""
    found = []
    for part in parts:
        path = folder / f"{part}.jsonl"
        for text in path.read_text().splitlines() if path.exists() else ():
            try:
                found.append(json.loads(text))
            except json.JSONDecodeError:  # the last line of a run that was killed
                found.append({"part": part, "case": "?", "state": "failed", "error": f"cut off: {text}", "at": 0.0})
    return found


def ended(folder: Path, cases: Iterable[Case]) -> list[Case]:
    """The cases that finished in an earlier run, without a failure."""
    states: dict[tuple[str, str], set[str]] = {}
    for row in rows_of(folder):
        states.setdefault((row["part"], row["case"]), set()).add(row["state"])
    return [
        case
        for case in cases
        if "done" in (found := states.get((case.part, case.name), set())) and "failed" not in found
    ]


def summary(folder: Path, parts: Sequence[str] = PARTS) -> int:
    """Print a table of each part, then targets, failures, missing cases and the answers to `QUESTIONS`.

    Return 1 for any failed or missing case.
    """
    rows = rows_of(folder, parts)
    rows += comparisons(rows)
    print("\n".join(tables(rows)))
    targets = [row for row in rows if row.get("target") is not None and row.get("value") is not None]
    for title, chosen in (("Targets", targets), *_troubles(rows).items()):
        print(f"\n{title}: {len(chosen)}")
        print("\n".join(line(row) for row in chosen))
    print("\nQuestions")
    print("\n".join(answers(rows)))
    bad = _troubles(rows)
    return int(not rows or any(bad[name] for name in ("Failed", "Not finished", "Not run")))


def answers(rows: list[Row]) -> list[str]:
    """Lines with the questions of `QUESTIONS`, each followed by the rows that answer it."""
    lines = []
    for place, question in enumerate(QUESTIONS, 1):
        found = [row for row in rows if row["state"] != "done" and _answers(question, row)]
        lines.append(f"{place}. {question.text}{'' if found else ' NOT MEASURED'}")
        if question.counts and found:
            counts = Counter(row["state"] for row in found)
            lines.append("   " + ", ".join(f"{count} {state}" for state, count in counts.items()))
        else:
            lines += [f"   {line(row)}" for row in found]
    return lines


def _answers(question: Question, row: Row) -> bool:
    is_of_case = f"{row['part']}/{row['case']}".startswith(question.cases)
    shown = f"{row.get('metric', '')} {row.get('unit', '')}"
    is_figure = row["state"] == "measured"
    return is_of_case and (not is_figure or not question.metrics or any(each in shown for each in question.metrics))


def _troubles(rows: list[Row]) -> dict[str, list[Row]]:
    names = ("Failed", "Not finished", "Not run", "Skipped")
    return {name: [row for row in rows if row["state"] == name.lower()] for name in names}


def comparisons(rows: list[Row]) -> list[Row]:
    """Speeds of fused models as multiples of the rival's speed, measured by another process on the same machine."""
    speeds = {
        (row.get("machine"), row["case"], row["metric"]): row
        for row in rows
        if row.get("unit") == "tokens/s" and " / " in row["case"]
    }
    found = []
    for (machine, case, metric), row in speeds.items():
        name, _, peer = case.partition(" / ")
        rival, least, where = RIVALS[row["part"]]
        other = speeds.get((machine, f"{name} / {rival}", metric))
        if peer == "oslo_models fused" and other is not None:
            target = {"target": least} if (name, metric) == where and not row.get("dry") else {}
            ratio = {"metric": f"{metric} / {rival}", "value": row["value"] / other["value"], "unit": ""}
            found.append({**row, **ratio, **target})
    return found


def tables(rows: list[Row]) -> list[str]:
    """Markdown: for each GPU and part a table: a line for each case, metric and unit, a column for each peer."""
    machines = list(dict.fromkeys(row["machine"] for row in rows if row.get("machine")))
    if len(machines) > 1:
        lines = []
        for each in machines:
            own = [row for row in rows if row.get("machine") == each]
            lines += [f"**{each.partition(',')[0]}**", "", *tables(own)]
        return lines
    lines: list[str] = []
    for part in PARTS:
        measured = [row for row in rows if row["part"] == part and row.get("value") not in (None, "")]
        if part == "tests":
            lines += _comparisons_of_tests(measured)
            measured = [row for row in measured if row["unit"] not in ("error", "tests")]
        peers = list(dict.fromkeys(row["peer"] for row in measured))
        cells: dict[tuple[str, str, str], dict[str, str]] = {}
        for row in measured:
            key = (row["case"].partition(" / ")[0], row["metric"], row["unit"])
            target = row.get("target")
            wanted = f" (target {number(float(target))})" if target not in (None, "") else ""
            broken = " (failed)" if row["state"] == "failed" else ""
            cells.setdefault(key, {})[row["peer"]] = f"{number(float(row['value']))}{wanted}{broken}"
        if cells:
            lines += [f"| {' | '.join([part, 'unit', *peers])} |", f"|---|---|{'---:|' * len(peers)}"]
            for (case, metric, unit), values in cells.items():
                shown = [f"{case}: {metric}", unit, *(values.get(peer, "") for peer in peers)]
                lines.append(f"| {' | '.join(shown)} |")
            lines.append("")
    return lines


def _comparisons_of_tests(rows: list[Row]) -> list[str]:
    """A line for each case: how many results agreed, the largest error, and pytest's counts."""
    lines = ["| tests | comparisons that agree | largest error | pytest |", "|---|---:|---:|---|"]
    for case in dict.fromkeys(row["case"] for row in rows if row["unit"] in ("error", "tests")):
        own = [row for row in rows if row["case"] == case]
        errors = [float(row["value"]) for row in own if row["unit"] == "error"]
        counts = ", ".join(f"{row['value']} {row['metric']}" for row in own if row["unit"] == "tests")
        largest = number(max(errors)) if errors else ""
        lines.append(f"| {case} | {len(errors) or ''} | {largest} | {counts} |")
    return [*lines, ""] if rows else []


def record(folder: Path) -> int:
    """Replace the rows of the measured cases in ``benchmarks/results-gpu.csv``, and write the page from it.

    A case that was not run keeps its former rows.
    """
    rows = [row for row in rows_of(folder) if row["state"] != "done"]
    if not rows or any(row.get("dry") for row in rows):
        print(f"{folder} has no rows of a GPU: nothing is recorded")
        return 1
    rows += comparisons(rows)
    former = read(RESULTS)
    known = {(row["part"], row["case"]) for row in former}
    rows = [row for row in rows if row["state"] not in MISSING or (row["part"], row["case"]) not in known]
    replaced = {(row["part"], row["case"]) for row in rows}
    kept = [row for row in former if (row["part"], row["case"]) not in replaced]
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        for row in [*kept, *rows]:
            value = row.get("value")
            shown = number(value) if isinstance(value, (int, float)) else value
            writer.writerow({**row, "value": shown, "error": _last_line(row.get("error") or "")})
    PAGE.write_text(page(PAGE.read_text(), read(RESULTS)))
    return 0


def read(path: Path) -> list[dict[str, str]]:
    """The committed rows; none if there is no file yet."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def page(text: str, rows: Sequence[Row]) -> str:
    """The page with the tables of these rows between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    if not rows:
        body = "No GPU has been measured yet."
    else:
        wheres = sorted(
            {f"{row['machine']}, {row['versions']}, at {row['commit']} ({row['date'][:10]})" for row in rows}
        )
        failed = [row for row in rows if row["state"] in ("failed", *MISSING)]
        wrong = [
            f"* {row['case']}, {row.get('peer') or ''} {row.get('metric') or ''}: {row['error']}" for row in failed
        ]
        body = "\n".join([*tables(list(rows)), *wrong, *([""] if wrong else []), f"Measured on: {'; '.join(wheres)}."])
    return f"{before}{BEGIN}\n\n{body}\n\n{END}{after}"
