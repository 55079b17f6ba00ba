"""``python -m benchmarks.rehearse tests|kernels|training|decoding|all --out DIR`` and ``... summary|record DIR``.

Each part writes ``DIR/<part>.jsonl``, a row as soon as it is known. Without a GPU it is a dry run at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.rehearse import report
from benchmarks.rehearse.cases import LIMITS, PARTS, ROOT, Case, by_value, cases
from benchmarks.rehearse.schedule import Report, Schedule

RESERVE = 8
"""Seconds before its limit at which a part ends its cases, to write the results so far."""


def main() -> int:
    """Run the command. Return 1 if a case failed or did not run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearse", description=__doc__)
    parser.add_argument("part", choices=[*PARTS, "all", "summary", "record"])
    parser.add_argument("folder", nargs="?", type=Path, metavar="DIR", help="of summary and record: where rows are")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where rows are written, and everything else")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="of each part")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="of all parts together: the most valuable cases come first"
    )
    parser.add_argument("--resume", action="store_true", help="keep the rows in DIR; run the cases that did not end")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="wheels to install into DIR first; default: --out")
    parser.add_argument(
        "--only", action="append", metavar="WORD",
        help="cases whose names contain this; their rows are added. Repeated: cases come in the order of the words",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="one case of each kind")
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU, as without a GPU")
    args = parser.parse_args()
    folder = args.folder or args.out
    if folder is None:
        parser.error("where to? --out DIR")
    if args.part in ("summary", "record"):
        return {"summary": report.summary, "record": report.record}[args.part](folder)
    signal.signal(signal.SIGTERM, _leave)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = PARTS if args.part == "all" else (args.part,)
    header, dry, gigabytes = machine(args.dry)
    if dry:
        print("no GPU, so this is a dry run, whose figures mean nothing", flush=True)
    for together in [parts] if dry or args.budget else [(part,) for part in parts]:
        limit = (args.budget or args.limit or sum(LIMITS[part] for part in together)) - RESERVE
        found = [case for part in together for case in cases(part, args.quick, dry)]
        if args.budget:
            found = by_value(found)
        if args.only:
            found = named(found, args.only)
        if args.resume:
            found = [case for case in found if case not in report.ended(folder, found)]
        with working_folder(folder) as work:
            environment = surroundings(work, dry)
            install(args.wheels or folder, work / "site")
            with rows_to(folder, together, header, "a" if args.only or args.resume else "w") as write:
                schedule = Schedule(work, dry, environment, write, os.cpu_count() or 1, gigabytes)
                schedule.run(found, time.monotonic() + limit)
    return report.summary(folder, parts)


def named(found: list[Case], words: list[str]) -> list[Case]:
    """Return the cases whose ``part/name`` contains a word, in the order of the words."""
    placed = []
    for case in found:
        place = next((number for number, word in enumerate(words) if word in f"{case.part}/{case.name}"), None)
        if place is not None:
            placed.append((place, case))
    return [case for _, case in sorted(placed, key=lambda pair: pair[0])]


@contextmanager
def working_folder(folder: Path) -> Iterator[Path]:
    """The working folder of the cases, deleted afterwards."""
    work = folder / ".work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def rows_to(folder: Path, parts: Iterable[str], header: dict[str, Any], mode: str) -> Iterator[Report]:
    """Return a function that prints a row and writes it at once to the file of its part."""
    start = time.monotonic()
    with ExitStack() as stack:
        files = {part: stack.enter_context((folder / f"{part}.jsonl").open(mode)) for part in parts}

        def write(case: Case, row: dict[str, Any]) -> None:
            row = {"part": case.part, "case": case.name, **row, "at": round(time.monotonic() - start, 1), **header}
            files[case.part].write(json.dumps(row) + "\n")
            files[case.part].flush()
            print(report.line(row), flush=True)

        yield write


def _leave(*_: Any) -> None:
    """Exit once, so that the processes are ended."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def machine(dry: bool) -> tuple[dict[str, Any], bool, float]:
    """Return the machine fields of every row, whether it is a dry run, and the gigabytes available to cases."""
    import torch

    from benchmarks.records import stamp

    header: dict[str, Any] = stamp()
    header["commit"] = commit(header["commit"])
    if dry or not torch.cuda.is_available():
        return {**header, "dry": True}, True, 1000
    from importlib.metadata import version

    header["machine"] = f"{torch.cuda.get_device_name()}, {header['machine']}"
    header["versions"] += f", triton {version('triton')}"
    return header, False, 0.9 * torch.cuda.get_device_properties(0).total_memory / 1e9


def commit(found: str) -> str:
    """Return the commit: ``$OSLO_COMMIT``, or else git's, or else the content of the file ``COMMIT``, or "unknown"."""
    file = ROOT / "COMMIT"
    return os.environ.get("OSLO_COMMIT") or found or (file.read_text().strip() if file.exists() else "unknown")


def surroundings(work: Path, dry: bool) -> dict[str, str]:
    """Return the environment of the cases: they write only to ``work``, and download nothing."""
    here = {name: str(work / name.lower()) for name in ("TMPDIR", "HF_HOME", "XDG_CACHE_HOME")}
    for path in here.values():
        Path(path).mkdir(exist_ok=True)
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""), str(work / "site")]
    python = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONDONTWRITEBYTECODE": "1"}
    threads = {"OMP_NUM_THREADS": "1"} if dry else {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    return {**os.environ, **here, **python, **threads, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


def install(wheels: Path, site: Path) -> None:
    """Unpack the wheels of a folder, if any, for the cases only. Installed packages take precedence."""
    found = sorted(map(str, wheels.glob("*.whl")))
    if found:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site)]
        done = subprocess.run([*pip, *found], capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"wheels of {wheels} cannot be installed:\n{done.stderr}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
