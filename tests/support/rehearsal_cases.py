"""Failing cases of a rehearsal, each with another fault, and one case that measures."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def raises(bench: Any) -> None:
    bench.row("peer", "before", 1.0, "us")
    with bench.attempt("peer", "broken"):
        raise ValueError("no such thing")
    bench.row("peer", "after", 2.0, "us", target=1.0)


def crashes(bench: Any) -> None:
    print("about to crash", flush=True)
    os.abort()


def hangs(bench: Any) -> None:
    bench.row("peer", "before", 1.0, "us")
    time.sleep(60)


def leaves_a_process(bench: Any) -> None:
    if os.fork() == 0:
        os.setsid()  # signals to the case's process group do not reach it
        time.sleep(4)
        os._exit(0)


def counts(bench: Any, folder: str) -> None:
    """Prepare for a long time: count in a file until `measures` has finished."""
    for number in range(1000):
        Path(folder, "count").write_text(str(number))
        time.sleep(0.1)
        if Path(folder, "measured").exists():
            bench.row("peer", "went on", number, "")
            return


def measures(bench: Any, folder: str) -> None:
    """Report the progress of `counts` during the measurement."""
    while not Path(folder, "count").exists():
        time.sleep(0.02)
    bench.ready()
    found = []
    for _ in range(2):
        time.sleep(0.5)  # lets a pending write finish
        found.append(int(Path(folder, "count").read_text() or -1))
    bench.row("peer", "counted", found[1] - found[0], "")
    Path(folder, "measured").touch()


def recompiles(bench: Any) -> None:
    """Use more shapes than dynamo compiles; the earlier figure is valid."""
    import torch

    torch._dynamo.config.recompile_limit = 2
    with bench.attempt("peer"):
        run = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
        run(torch.ones(2))
        bench.row("peer", "first", 1.0, "us", graphs=bench.watch.graphs)
        for size in range(3, 7):
            run(torch.ones(size))
        bench.row("peer", "last", 1.0, "us")
    with bench.attempt("other"):
        torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] += 1
        bench.row("other", "skipped", 1.0, "us")
    with bench.attempt("third"):
        bench.row("third", "neither", 1.0, "us")
