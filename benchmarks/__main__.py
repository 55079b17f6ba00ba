"""Run benchmark cases, print their results and append them to ``benchmarks/results.csv``."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.cases import CASES, OWN, Case
from benchmarks.compare import Change
from benchmarks.definitions import UNITS, Result
from benchmarks.launch import MeasurementError, launch
from benchmarks.peers import PEERS
from benchmarks.records import RESULTS, append, number, stamp


def main() -> int:
    """Run the cases of the command line. Return 1 if a case failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes child processes and checkpoints
    commands = {"compare": "compare", "load": "load", "soak": "soak", "tokens": "fused_tokens"}
    if sys.argv[1:2] and sys.argv[1] in commands:
        command = importlib.import_module(f"benchmarks.{commands[sys.argv[1]]}")
        return int(command.main(sys.argv[2:]))
    epilog = (
        "`python -m benchmarks compare --help`: two commits against each other; `load --help` and `soak --help`: HTTP "
        "servers; `tokens --help`: fused models against transformers."
    )
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, epilog=epilog)
    parser.add_argument(
        "group", nargs="?", choices=["fuse-check"], help="run only these cases: whether fuse() makes anything slower"
    )
    parser.add_argument("--list", action="store_true", help="show the cases and exit")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="run only this case (repeatable)")
    parser.add_argument("--repeat", metavar="N", type=int, default=3, help="runs of each peer, in turn (default: 3)")
    parser.add_argument("--out", metavar="FILE", type=Path, default=RESULTS, help="where rows are appended")
    parser.add_argument("--smoke", action="store_true", help="tiny models, one run, nothing written: does it work?")
    args = parser.parse_args()
    if unknown := set(args.only) - CASES.keys():
        parser.error(f"no case {', '.join(sorted(unknown))}; --list shows them")
    chosen = args.only or [name for name in CASES if name.startswith(args.group or "")]
    if args.list:
        for case in CASES.values():
            print(f"{case.name:24} {case.what:36} {', '.join(case.peers)}")
        return 0
    load = os.getloadavg()[0]
    if load > 0.5 and not args.smoke:
        print(f"the machine is not quiet (load {load:.1f}): timings will not be worth much", file=sys.stderr)
    header, failed = stamp(), 0
    with tempfile.TemporaryDirectory() as folder:
        for case in [CASES[name] for name in chosen]:
            try:
                rows = _rows(case, _measure(case, Path(folder), 1 if args.smoke else args.repeat, args.smoke))
            except MeasurementError as error:
                print(f"FAILED {error}", file=sys.stderr)
                failed = 1
                continue
            if args.smoke:
                continue
            append(args.out, [{**header, **row} for row in rows])
            for row in rows:
                if case.limit is not None and float(row["min"]) > case.limit:
                    figures = f"{row['value']} ({row['min']} to {row['max']})"
                    print(f"FAILED {case.name}: {row['peer']}, {row['metric']}: {figures}", file=sys.stderr)
                    failed = 1
    return failed


def _measure(case: Case, folder: Path, repeat: int, smoke: bool) -> dict[str, list[Result]]:
    """Measure every peer once per repetition. Peers alternate, so that drift of the machine cancels."""
    print(f"{case.name}: {case.what}", flush=True)
    case.prepare(folder, smoke)
    results: dict[str, list[Result]] = {}
    for name in case.peers:
        if missing := PEERS[name].missing():
            print(f"  {name}: left out, {' and '.join(missing)} not installed", flush=True)
        else:
            results[name] = []
    for _ in range(repeat):
        for name in results:
            results[name].append(launch(case, PEERS[name], folder, smoke))
    first, expected = next((name, found[0].check) for name, found in results.items())
    for name, result in [(name, result) for name, found in results.items() for result in found]:
        for mine, right in zip(result.check, expected, strict=True):
            if not math.isclose(mine, right, rel_tol=case.tolerance):
                raise MeasurementError(f"{case.name}: {name} computed {mine}, {first} {right}")
    return results


def _rows(case: Case, results: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """Return a CSV row for every peer and metric. Computed references count as peers without processes."""
    runs = {peer: [result.values for result in found] for peer, found in results.items()}
    for found in [results[name] for name in OWN if name in results][:1]:
        runs |= {name: [result.references[name] for result in found] for name in found[0].references}
    rows = []
    for peer, metric in [(peer, metric) for peer, measured in runs.items() for metric in measured[0]]:
        values, shape = [run[metric] for run in runs[peer]], ""
        if peer in PEERS:
            shape = f"{PEERS[peer].processes}x{PEERS[peer].threads}"
        # formed within each repetition, since the machine may drift between them
        pairs = zip(values, [run.get(metric) for run in runs.get(case.baseline, [])], strict=False)
        ratios = [mine / theirs for mine, theirs in pairs if theirs]
        measured = {"value": statistics.median(values), "min": min(values), "max": max(values), "repeats": len(values)}
        if pairs_of_calls := [ratio for result in results.get(peer, []) for ratio in result.pairs.get(metric, [])]:
            change = Change.of(pairs_of_calls)
            measured = {"value": change.ratio, "min": change.low, "max": change.high, "repeats": len(pairs_of_calls)}
        row = {
            **{"case": case.name, "peer": peer, "processes x threads": shape, "metric": metric, "unit": UNITS[metric]},
            **measured,
            **({"ratio": statistics.median(ratios), "ratio to": case.baseline} if ratios else {}),
        }
        rows.append({key: number(value) if isinstance(value, float) else value for key, value in row.items()})
        ratio = f"{rows[-1]['ratio']} x {case.baseline}" if ratios else ""
        print(f"  {peer:31} {metric:29} {rows[-1]['value']:>8} {row['unit']:12} {ratio}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
