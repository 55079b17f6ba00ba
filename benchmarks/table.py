"""The tables of the README, made from ``benchmarks/results.csv``."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from benchmarks.cases import CASES, OWN
from benchmarks.measure import UNITS

FIELDS = (
    *("date", "commit", "machine", "versions", "case", "peer", "processes x threads", "metric", "unit"),
    *("value", "min", "max", "repeats", "ratio", "ratio to"),
)
RESULTS = Path(__file__).with_name("results.csv")
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
TITLES = {  # by the runner of a case
    "generate": "tokens per second, more is better",
    "serve": "tokens per second from deploy=True, two workers, more is better",
    "train": "seconds per step, less is better",
    "train_in_stages": "two pipeline stages, 8 micro-batches",
    "collectives": "communication of a step, less is better",
    "load_memory": "memory of a process, less is better",
    "all_reduce": "microseconds, less is better",
    "merge_memory": "memory of a process, less is better",
    "preprocess": "tokens per second, two cores, more is better",
    "preprocess_memory": "memory of all processes, less is better",
    "index_samples": "an index of samples",
    "blend": "seconds, less is better",
    "loss": "fused by model.fuse(), less is better",
    "mlp": "fused by model.fuse(), less is better",
    "adamw": "fused by model.fuse(), less is better",
    "blocking": "fused by model.fuse(), less is better",
    "training": "fused by model.fuse(), less is better",
    "generation": "fused by model.fuse(), less is better",
    "decoding": "fused by model.fuse(), less is better",
    "start": "deploy=True, less is better",
    "call_overhead": "deploy=True, less is better",
    "application_memory": "deploy=True, less is better",
}
RowParallel = dict[str, str]


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def latest(path: Path) -> list[RowParallel]:
    """The rows of the last run of every case."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] in CASES]
    last = {row["case"]: row["date"] for row in rows}
    return [row for row in rows if row["date"] == last[row["case"]]]


def tables(rows: list[RowParallel]) -> str:
    """Markdown: a table for each kind of case, and where the figures come from."""
    if not rows:
        return ""
    titled = [(TITLES[CASES[row["case"]].runner.__name__], row) for row in rows]
    kinds = {title: [row for own, row in titled if own == title] for title in TITLES.values()}
    parts = [_table(title, measured) for title, measured in kinds.items() if measured]
    runs = min(int(row["repeats"]) for row in rows)
    where = sorted({f"{row['machine']}, {row['versions']}, commit {row['commit']}, {row['date'][:10]}" for row in rows})
    how = (
        f"Median (minimum to maximum) of at least {runs} runs in fresh processes, the peers in turn; 2x1 is two "
        "processes with one thread each; ratio: oslo_models to what is named, median of the runs. "
    )
    return "\n\n".join([*parts, how + "Measured on: " + "; ".join(where) + "."])


def _table(title: str, rows: list[RowParallel]) -> str:
    peers = {row["peer"]: f"{row['peer']} {row['processes x threads']}".strip() for row in rows}
    order = sorted(peers, key=lambda peer: (peer in OWN, peer))
    lines = ["| " + " | ".join([title, *(peers[peer] for peer in order), "ratio"]) + " |"]
    lines.append("|---|" + "---:|" * (len(order) + 1))
    for case, metric in sorted({(row["case"], row["metric"]): None for row in rows}, key=_position):
        cells = {row["peer"]: row for row in rows if (row["case"], row["metric"]) == (case, metric)}
        several = len({row["metric"] for row in rows}) > 1
        ours = next((cells[peer] for peer in OWN if peer in cells), {})
        ratio = f"{ours['ratio']} x {ours['ratio to']}" if ours.get("ratio") else ""
        label = CASES[case].what + (f": {metric} ({UNITS[metric]})" if several else "")
        lines.append("| " + " | ".join([label, *(_cell(cells.get(peer)) for peer in order), ratio]) + " |")
    return "\n".join(lines)


def _position(row: tuple[str, str]) -> tuple[int, int]:
    return list(CASES).index(row[0]), list(UNITS).index(row[1])


def _cell(row: RowParallel | None) -> str:
    if row is None:
        return ""
    return row["value"] if row["min"] == row["max"] else f"{row['value']} ({row['min']} to {row['max']})"


def main() -> int:
    """Print the tables, write them between the markers of a file, or check that they stand there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--results", metavar="FILE", type=Path, default=RESULTS, help="what the benchmarks wrote")
    parser.add_argument("--write", metavar="README", type=Path, help="replace what stands between its markers")
    parser.add_argument("--check", metavar="README", type=Path, help="fail unless this stands between its markers")
    args = parser.parse_args()
    text, path = tables(latest(args.results)), args.write or args.check
    if path is None:
        print(text)
        return 0
    content = path.read_text()
    before, begun, rest = content.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not begun or not ended:
        print(f"{path}: no {BEGIN} with {END} after it", file=sys.stderr)
        return 1
    renewed = "".join([before, BEGIN, "\n", f"\n{text}\n\n" if text else "", END, after])
    if args.write:
        path.write_text(renewed)
    elif renewed != content:
        print(f"{path}: its figures are not those of {args.results}; run with --write {path}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
