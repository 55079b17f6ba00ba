"""The process of one case: ``python -m benchmarks.rehearse.child PART NAME DRY FD``. Rows go to the file descriptor."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys


def main() -> int:
    part, name, dry, fd = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # where it hangs, for a row
    os.set_inheritable(int(fd), False)
    import torch

    from benchmarks.rehearse.bench import Bench
    from benchmarks.rehearse.cases import cases

    case = next(case for case in cases(part) if case.name == name)
    torch.manual_seed(0)
    with os.fdopen(int(fd), "w") as rows:
        bench = Bench(rows, sys.stdin, dry == "dry")
        with bench.attempt(""):
            module, _, function = case.run.partition(":")
            getattr(importlib.import_module(f"benchmarks.rehearse.{module}"), function)(bench, **case.options)
    return int(bench.failed)


if __name__ == "__main__":
    sys.exit(main())
