"""The tables of the documentation, made from ``benchmarks/results.csv``."""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

from benchmarks.cases import CASES, OWN
from benchmarks.definitions import LIMITS, UNITS, more_is_better
from benchmarks.records import RESULTS, number

ENOUGH_RUNS, FEW = 3, "\N{DAGGER}"
"""Rows of fewer runs are marked."""
BEGIN, END = "<!-- benchmarks:begin -->", "<!-- benchmarks:end -->"
TITLES = {  # by the runner of a case
    "generate": "tokens per second, more is better",
    "first_token": "milliseconds to the first token, less is better",
    "rollouts": "tokens per second of sampled groups, until their end tokens, more is better",
    "mixed_rows": "decoding steps of rows of different lengths",
    "take_steps": "GRPO: rollouts, and whole steps",
    "draft": "tokens per second with drafted tokens, more is better",
    "text_and_images": "text and images: first tokens after images, decoding, and training on rows of one image",
    "serve": "tokens per second from deploy=True, two workers, more is better",
    "streams": "streams of an HTTP server, which begin one after the other",
    "image_streams": "streams of an HTTP server to clients with images beside clients without",
    "agreement": "deploy=True on one host, less is better",
    "train": "seconds per step, less is better",
    "train_long": "forward and backward of long sequences, one thread, less is better",
    "train_divided": "tokens divided over ranks, less is better",
    "longest_row": "tokens of the longest row within a limit of memory, more is better",
    "train_lora": "seconds per step of LoRA by peft, less is better",
    "train_in_stages": "two pipeline stages, 8 micro-batches",
    "idle_time": "idle time of pipeline stages in percent, less is better",
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
    "checking": "CPU time that its check adds to model.fuse(), one thread, less is better",
    "decoding": "fused by model.fuse(), less is better",
    "token": "CPU time of a token at batch 1, one thread, less is better",
    "slowdown": "time of a fused model divided by the unfused one, less is better",
    "start": "deploy=True, less is better",
    "call_overhead": "deploy=True, less is better",
    "call_of_generate": "deploy=True, less is better",
    "application_memory": "deploy=True, less is better",
}
Row = dict[str, str]
"""A row of the CSV, by field."""


def latest(path: Path) -> list[Row]:
    """The rows of the last run of every case, of committed states only."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["case"] in CASES and "dirty" not in row["commit"]]
    last = {row["case"]: row["date"] for row in rows}
    return [row for row in rows if row["date"] == last[row["case"]]]


def tables(rows: list[Row]) -> str:
    """Markdown: a table for each kind of case, then how and where the figures were measured."""
    if not rows:
        return ""
    titled = [(TITLES[CASES[row["case"]].runner.__name__], row) for row in rows]
    kinds = {title: [row for own, row in titled if own == title] for title in TITLES.values()}
    parts = [_table(title, measured) for title, measured in kinds.items() if measured]
    commits: dict[str, set[str]] = {}
    for row in rows:
        commits.setdefault(f"{row['machine']}, {row['versions']}", set()).add(f"{row['commit']} ({row['date'][:10]})")
    where = [f"{machine}, at {', '.join(sorted(states))}" for machine, states in sorted(commits.items())]
    how = (
        f"Median (minimum to maximum) of {ENOUGH_RUNS} or more runs in fresh processes, the peers in turn; rows with "
        f"{FEW} rest on fewer. 2x1 is two processes with one thread each. Ratio: the median of the last oslo_models "
        "column to that of the best other column, which is named. Limits were measured in the processes of that last "
        "column: reading the weights and the cache once, and the products of linear layers by torch alone. "
    )
    return "\n\n".join([*parts, how + "Measured on: " + "; ".join(where) + "."])


def _table(title: str, rows: list[Row]) -> str:
    peers = {row["peer"]: f"{row['peer']} {row['processes x threads']}".strip() for row in rows}
    order = sorted(peers, key=lambda peer: (peer in OWN, peer))
    lines = ["| " + " | ".join([title, *(peers[peer] for peer in order), "ratio"]) + " |"]
    lines.append("|---|" + "---:|" * (len(order) + 1))
    several = len({row["metric"] for row in rows}) > 1
    for case, metric in sorted({(row["case"], row["metric"]): None for row in rows}, key=_position):
        cells = {row["peer"]: row for row in rows if (row["case"], row["metric"]) == (case, metric)}
        label = CASES[case].what + (f": {metric} ({UNITS[metric]})" if several else "")
        if min(int(row["repeats"]) for row in cells.values()) < ENOUGH_RUNS:
            label += f" {FEW}"
        lines.append("| " + " | ".join([label, *(_cell(cells.get(peer)) for peer in order), _ratio(cells)]) + " |")
    return "\n".join(lines)


def _ratio(cells: dict[str, Row]) -> str:
    """Return the ratio of our median to the strongest other peer of a row, with the name of the peer."""
    ours = next((cells[peer] for peer in OWN if peer in cells), None)
    others = {peer: float(row["value"]) for peer, row in cells.items() if peer not in (*OWN, *LIMITS)}
    if ours is None or not others:
        return ""
    best = max if more_is_better(ours["unit"]) else min
    name = best(others, key=others.__getitem__)
    return f"{number(float(ours['value']) / others[name])} x {name}" if others[name] else ""


def _position(row: tuple[str, str]) -> tuple[int, int]:
    return list(CASES).index(row[0]), list(UNITS).index(row[1])


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return row["value"] if row["min"] == row["max"] else f"{row['value']} ({row['min']} to {row['max']})"


def main() -> int:
    """Print the tables, write them between the markers of a file, or check that they are there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("--results", metavar="FILE", type=Path, default=RESULTS, help="the CSV of the benchmarks")
    parser.add_argument("--write", metavar="PAGE", type=Path, help="replace the text between its markers")
    parser.add_argument("--check", metavar="PAGE", type=Path, help="fail unless they are there")
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
