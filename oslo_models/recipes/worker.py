"""A rank of a recipe, started by `launching.launch`: ``python -m oslo_models.recipes.worker TASK [ARGUMENT ...]``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from oslo_models.recipes.run import run_rank

_PR_SET_PDEATHSIG = 1


def _end_with_launcher() -> None:
    """Let Linux kill this process when its launcher is killed: the same command may start again at once."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Train. The launcher reads the exception from a file, so nothing is printed here."""
    _end_with_launcher()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher passes Ctrl-C on: end at once, in collectives too
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    task, *arguments = sys.argv[1:]
    try:
        record(run_rank)(task, arguments)
    except Exception:  # noqa: BLE001
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a normal exit would wait for ranks that are gone


if __name__ == "__main__":
    main()
