"""Draws the images of the documentation from the committed CSV files: ``python -m benchmarks.plots``."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks import loss_parity
from benchmarks.cases import CASES, OURS_ALONE, OURS_OVER_CONTEXT, OWN, ULYSSES
from benchmarks.table import RESULTS, latest

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
FEW = 3
"""With fewer runs, a panel states their number."""
OURS, THEIRS, LIMIT = "#2563a8", "#b0b4ba", "#c2410c"
LIMITS = ("limit", "checkpoint")
"""How the names of the rows begin that are drawn as lines."""
THROUGHPUT = {
    "llama-100m-generate-b1": "generation",
    "llama-100m-generate-b8": "generation",
    "gpt2-124m-generate-b1": "generation",
    "gpt2-124m-generate-b8": "generation",
    "llama-100m-stages": "training",
    "gpt2-124m-stages": "training",
}
"""The plotted metric of each case."""
MEMORY = {
    "load-memory": "peak memory",
    "llama-100m-stages": "peak memory",
    "gpt2-124m-stages": "peak memory",
    "fused-loss": "peak memory",
}


LENGTHS = (2048, 4096, 8192)
"""Tokens of the rows of ``llama-20m-context-*``."""


def draw_loss_parity() -> Figure:
    """Both losses in one panel, and their difference below."""
    with loss_parity.RESULTS.open(newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    one, four = ([float(row[run]) for row in rows] for run in loss_parity.RUNS)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    above.plot(steps, one, color=THEIRS, linewidth=4, label="one process")
    above.plot(steps, four, color=OURS, linewidth=1, label="four processes: tp=2 x pp=2")
    above.set(ylabel="loss", title="GPT-2 of 0.8 million parameters, float32")
    above.legend(frameon=False)
    below.semilogy(steps, [max(abs(a - b), 1e-9) for a, b in zip(one, four, strict=True)], color=OURS, linewidth=1)
    below.set(xlabel="step", ylabel="|difference|")
    return figure


def draw_lengths() -> Figure:
    """Peak memory of a rank by the tokens of a row, and the time of a step."""
    rows = {(row["case"], row["peer"], row["metric"]): row for row in latest(RESULTS)}
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    figure.suptitle("Training on one row: Llama of 20 million parameters, float32")
    for axes, metric, label in zip(
        figure.subplots(1, 2),
        ("peak anonymous memory", "training step"),
        ("peak memory of a rank, GB", "step, s"),
        strict=True,
    ):
        for peer, colour, style in ((OURS_ALONE, THEIRS, "-"), (OURS_OVER_CONTEXT, OURS, "-"), (ULYSSES, LIMIT, "--")):
            found = {n: rows[key] for n in LENGTHS if (key := (f"llama-20m-context-{n}", peer, metric)) in rows}
            values = [float(row["value"]) / (1000 if row["unit"] == "MB" else 1) for row in found.values()]
            axes.plot([*found], values, style, marker="o", color=colour, label=peer)
        axes.set(xlabel="tokens", ylabel=label, xticks=LENGTHS, ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    return figure


def draw_bars(metrics: dict[str, str], unit: str, title: str, *, descending: bool) -> Figure:
    """Draw a panel for each case: a bar for each peer, the best on top, and a line for each limit."""
    rows = latest(RESULTS)
    figure = Figure(figsize=(9, 1.75 * ((len(metrics) + 1) // 2) + 0.4), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots((len(metrics) + 1) // 2, 2).flat
    for axes, (case, metric) in zip(panels, metrics.items(), strict=False):
        found = [row for row in rows if (row["case"], row["metric"]) == (case, metric)]
        _panel(axes, case, unit, sorted(found, key=lambda row: float(row["value"]), reverse=descending))
    return figure


def _panel(axes: Any, case: str, unit: str, rows: list[dict[str, str]]) -> None:
    limits = [row for row in rows if row["peer"].startswith(LIMITS)]
    rows = [row for row in rows if row not in limits]
    values = [float(row["value"]) for row in rows]
    reach = [[v - float(row["min"]) for v, row in zip(values, rows, strict=True)]]
    reach += [[float(row["max"]) - v for v, row in zip(values, rows, strict=True)]]
    labels = [f"{row['peer']} {row['processes x threads']}".strip() for row in rows]
    colours = [OURS if row["peer"] in OWN else THEIRS for row in rows]
    axes.barh(labels, values, xerr=[[max(r, 0) for r in side] for side in reach], color=colours, ecolor="#444444")
    axes.invert_yaxis()
    for position, row in enumerate(rows):
        axes.text(
            0.01 * max(values),
            position,
            row["value"],
            va="center",
            fontsize=8,
            color="white" if row["peer"] in OWN else "black",
        )
    for row in limits:
        axes.axvline(float(row["value"]), color=LIMIT, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{row['peer']}: {row['value']} ",
            (float(row["value"]), 0.04),
            xycoords=("data", "axes fraction"),
            ha="right",
            fontsize=7,
            color=LIMIT,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    runs = min(int(row["repeats"]) for row in rows)
    note = f" ({runs} {'run' if runs == 1 else 'runs'})" if runs < FEW else ""
    axes.set_title(CASES[case].what + note, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
    processor = rows[0]["machine"].partition(",")[0].replace("(R)", "")
    axes.set_xlabel(f"{unit} ({processor})", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> int:
    """Draw all plots. The same CSV files give the same bytes."""
    images = {
        "loss_parity.png": draw_loss_parity(),
        "throughput.png": draw_bars(
            THROUGHPUT, "tokens/s, more is better", "Throughput on two CPU cores", descending=True
        ),
        "long_rows.png": draw_lengths(),
        "memory.png": draw_bars(MEMORY, "MB per process, less is better", "Peak memory", descending=False),
    }
    IMAGES.mkdir(exist_ok=True)
    for name, figure in images.items():
        figure.savefig(IMAGES / name, dpi=110, metadata={"Software": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
