"""Run cases on two commits in turn, and say which figures moved by more than noise.

Each commit is checked out into a temporary folder (`git worktree`), so uncommitted changes are not measured. A pair of
runs, one of each commit, is formed in alternating order, in fresh processes; a row of the report is the median of the
pairs' ratios HEAD / BASE with a 95 % interval (bootstrap of the median). A figure has moved if its interval does not
contain 1.

  python -m benchmarks compare main HEAD --only llama-100m-generate-b1
  python -m benchmarks compare main HEAD --only all-reduce-4kb --pairs 12  narrower intervals
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import CASES, OWN
from benchmarks.definitions import more_is_better
from benchmarks.records import ROOT

RESAMPLES, LEVEL, FEWEST = 10_000, 0.95, 5
"""Resamples of a bootstrap, the level of its interval, and the minimum number of pairs for an interval."""

_SOME_PEERS = """
import dataclasses, sys
from benchmarks import __main__ as command, cases
for name, case in list(cases.CASES.items()):
    cases.CASES[name] = dataclasses.replace(case, peers=tuple(peer for peer in case.peers if peer in {peers}))
sys.exit(command.main())
"""
"""Runs the command of a checkout with some peers. Older commits have no option for it."""

Figures = dict[tuple[str, str, str], tuple[float, str]]
"""Values with their units, by case, peer and metric."""
Measure = Callable[[Path, str], Figures]
"""Measures a case once in a checkout."""


@dataclass(frozen=True)
class Change:
    """The change of a figure between two commits.

    Attributes:
        ratio: Median of the pairs' ratios HEAD / BASE.
        low, high: Interval of that median.
    """

    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, ratios: Sequence[float]) -> Change:
        """Compute the change from the ratios of pairs. It is deterministic."""
        draw = random.Random(0)
        medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
        outside = int(RESAMPLES * (1 - LEVEL) / 2)
        return cls(statistics.median(ratios), medians[outside], medians[-1 - outside])

    @property
    def moved(self) -> bool:
        """Whether the change exceeds the noise."""
        return not self.low <= 1 <= self.high

    def verdict(self, unit: str) -> str:
        """Return one word for the change. Higher is better for rates."""
        if not self.moved:
            return "noise"
        return "better" if (self.ratio > 1) == more_is_better(unit) else "WORSE"


def compare(base: Path, head: Path, case: str, pairs: int, measure: Measure) -> dict[tuple[str, str, str], list[float]]:
    """Return the ratios of all pairs, for the figures of both checkouts."""
    ratios: dict[tuple[str, str, str], list[float]] = {}
    for pair in range(pairs):
        found = {folder: measure(folder, case) for folder in ((base, head) if pair % 2 else (head, base))}
        for key in found[base].keys() & found[head].keys():
            if found[base][key][0]:
                ratios.setdefault(key, []).append(found[head][key][0] / found[base][key][0])
    return ratios


@contextmanager
def checkouts(repository: Path, *commits: str) -> Iterator[list[Path]]:
    """Check the commits out into temporary folders.

    Raises:
        ValueError: git does not know a commit.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = [Path(folder, str(number)) for number in range(len(commits))]
        git = ["git", "-C", str(repository), "worktree"]
        try:
            for path, commit in zip(made, commits, strict=True):
                done = subprocess.run([*git, "add", "--detach", str(path), commit], capture_output=True, text=True)
                if done.returncode:
                    raise ValueError(f"{commit} cannot be checked out: {done.stderr.strip()}")
            yield made
        finally:
            for path in made:
                subprocess.run([*git, "remove", "--force", str(path)], capture_output=True, check=False)


def measure(folder: Path, case: str, peers: Sequence[str] = OWN) -> Figures:
    """Run a case once in a checkout and return the figures of the peers.

    Raises:
        RuntimeError: The case failed in the checkout.
    """
    path = os.pathsep.join([str(folder), str(folder / "kernels")])
    with tempfile.TemporaryDirectory() as results:
        out = Path(results, "results.csv")
        command = [sys.executable, "-c", _SOME_PEERS.format(peers=tuple(peers))]
        command += ["--only", case, "--repeat", "1", "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if done.returncode or not out.exists():
            raise RuntimeError(f"{case} failed in {folder}:\n{(done.stdout + done.stderr)[-2000:]}")
        with out.open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["peer"] in peers]
    return {(row["case"], row["peer"], row["metric"]): (float(row["value"]), row["unit"]) for row in rows}


def main(arguments: Sequence[str]) -> int:
    """Compare two commits. Return 1 if a figure became worse."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__, formatter_class=form)
    parser.add_argument("base", metavar="BASE", help="a commit, branch or tag")
    parser.add_argument("head", metavar="HEAD", help="another one")
    parser.add_argument("--only", metavar="NAME", action="append", required=True, help="a case (repeatable)")
    parser.add_argument(
        "--peer", metavar="NAME", action="append", choices=OWN, help="one of our own peers (repeatable)"
    )
    parser.add_argument("--pairs", metavar="N", type=int, default=8, help="pairs of runs (default: 8)")
    args = parser.parse_args(arguments)
    if unknown := set(args.only) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; python -m benchmarks --list shows them")
    if args.pairs < FEWEST:
        parser.error(f"--pairs {args.pairs} is too few for an interval: at least {FEWEST}")
    worse = 0
    try:
        with checkouts(ROOT, args.base, args.head) as (base, head):
            for case in args.only:
                units: dict[tuple[str, str, str], str] = {}

                def run(folder: Path, name: str, units: dict[tuple[str, str, str], str] = units) -> Figures:
                    found = measure(folder, name, args.peer or OWN)
                    units.update({key: unit for key, (_, unit) in found.items()})
                    return found

                for key, ratios in sorted(compare(base, head, case, args.pairs, run).items()):
                    change = Change.of(ratios)
                    verdict = change.verdict(units[key])
                    worse |= verdict == "WORSE"
                    figures = f"{change.ratio:6.3f} ({change.low:.3f} to {change.high:.3f})"
                    print(f"{key[0]:24} {key[1]:24} {key[2]:24} {figures}  {verdict}", flush=True)
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    return worse
