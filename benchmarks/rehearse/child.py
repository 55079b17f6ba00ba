"""The process of one case: ``python -m benchmarks.rehearse.child MODULE:FUNCTION OPTIONS dry|gpu FD``.

Options are JSON; rows go to the file descriptor.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import signal
import sys


def main() -> int:
    run, options, dry, fd = sys.argv[1:]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints the location of a hang, for a row
    os.set_inheritable(int(fd), False)
    import torch

    from benchmarks.rehearse.bench import Bench

    torch.manual_seed(0)
    with os.fdopen(int(fd), "w") as rows:
        bench = Bench(rows, sys.stdin, dry == "dry")
        with bench.attempt(""):
            module, _, function = run.partition(":")
            getattr(importlib.import_module(module), function)(bench, **json.loads(options))
        bench.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
