"""The cost of ``deploy=True`` to the application: start-up time, overhead of a call, memory."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.definitions import Peer, Result
from benchmarks.measure import tokens


def start(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Seconds from ``python app.py`` to the first answer, imports included."""
    app = Path(__file__).parent / "applications" / "first_answer.py"
    how = "deployed" if peer.name.endswith("deploy") else "alone"
    command = [sys.executable, str(app), cls, str(checkpoint), how]
    # Use the default number of threads, as for a user who sets no variables.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return Result({"start": found["seconds"]}, found["answer"])


def call_overhead(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, timed: int, row: int = 20) -> Result:
    """Overhead of a call of a deployed model over a call of the same model in this process.

    Each model is called ``row`` times in a row. These series alternate, so that a slow phase of the machine affects
    both. Neighbours on a shared host slow single cores down by up to 1.7 times. So both series of a pair compute on the
    same core, here and in the worker, and the next pair takes another core.
    """
    import torch

    import oslo_models

    torch.set_num_threads(1)  # a tiny model gains nothing from a second thread, but would wait for it
    here = getattr(oslo_models, cls).from_pretrained_with_parallel(tiny)
    there = getattr(oslo_models, cls).from_pretrained_with_parallel(tiny, deploy=True)
    ids = tokens(here, 1, 4)
    (worker,) = there._engine.pids
    cores = os.sched_getaffinity(0)

    def median(model: Any) -> float:
        seconds = []
        for _ in range(row):
            began = time.perf_counter()
            model(input_ids=ids)
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    overheads = []
    with torch.no_grad(), there:
        for pair in range(-(-timed // row) + 2):
            core = sorted(cores)[pair % len(cores)]
            _keep(worker, {core})
            _keep(os.getpid(), {core})
            alone = median(here)
            _keep(os.getpid(), cores - {core} or cores)
            overheads.append(median(there) - alone)
    return Result({"call overhead": statistics.median(overheads[2:]) * 1e3}, [], {"goal": {"call overhead": 0.5}})


def call_of_generate(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, timed: int, ranks: int, threads: int, row: int = 20
) -> Result:
    """Duration of ``generate`` of one token, called as in applications.

    One or several threads call it and wait for their answers, on any core. A deployed model of one rank alternates with
    a model in this process. For several ranks, the undeployed peer has the same number of processes. Several threads in
    one process take turns of several calls, so their median is not meaningful: use the rate.
    """
    import torch

    import oslo_models

    torch.set_num_threads(1)

    def call(model: Any) -> float:
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=1, do_sample=False, pad_token_id=0)
        return time.perf_counter() - began

    def series(model: Any) -> list[float]:
        def calls() -> list[float]:
            return [call(model) for _ in range(row)]

        return [each for future in [pool.submit(calls) for _ in range(threads)] for each in future.result()]

    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        models: list[Any] = []
        if not peer.name.endswith("deploy"):
            models.append(peer.load(cls, tiny).eval())
        else:
            load = getattr(oslo_models, cls).from_pretrained_with_parallel
            models.append(stack.enter_context(load(tiny, ranks, deploy=True)))
            models += [load(tiny).eval()] if ranks == 1 else []
        ids = tokens(models[0], 1, 4)
        pairs = [[series(model) for model in models] for _ in range(-(-timed // (row * threads)) + 2)][2:]

    found = []
    for alike in zip(*pairs, strict=True):
        seconds = [each for own in alike for each in own]
        slow = statistics.quantiles(seconds, n=100)[-1]
        rate = threads / statistics.mean(seconds)
        found.append({"call": statistics.median(seconds) * 1e3, "call, p99": slow * 1e3, "calls": rate})
    return Result(found[0], [], dict(zip(("in process",), found[1:], strict=False)))


def _keep(process: int, cores: set[int]) -> None:
    """Pin all threads of a process to these cores."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), cores)


def application_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Peak memory of the application while it deploys and calls a model, above the memory after a tiny model."""
    from benchmarks.instruments import PeakMemory

    def answer(path: Path) -> None:
        with peer.load(cls, path) as model:
            model.generate(tokens(model, 1, 8), max_new_tokens=1)

    answer(tiny)
    memory = PeakMemory()
    with memory.watched():
        answer(checkpoint)
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e6
    return Result(memory.growth, [], {"checkpoint": dict.fromkeys(memory.growth, size)})
