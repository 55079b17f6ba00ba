"""What ``deploy=True`` costs the application: time to start, time of a call, memory."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, tokens
from benchmarks.peers import Peer


def start(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """From the start of the process, imports included, to the first answer."""
    model = peer.load(cls, checkpoint)
    ids = tokens(model, 1, 8)
    answer = model.generate(ids, attention_mask=ids.new_ones(ids.shape), max_new_tokens=1, do_sample=False)
    began = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return Result({"start": time.clock_gettime(time.CLOCK_BOOTTIME) - began}, answer.flatten().tolist())


def call_overhead(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, timed: int, row: int = 20) -> Result:
    """What a call of a deployed model takes beyond that of the same model in this process.

    Both are called as applications do, many times in a ``row``, and the rows alternate: what slows the machine down
    for a while meets both. So does what slows down one core only, as neighbours on a shared host do by a factor of up
    to 1.7: in a pair of rows the same core computes the model, here and in the worker, and the next pair takes another.
    """
    import torch

    import oslo_models

    torch.set_num_threads(1)  # of which a tiny model has no use for two, and they would wait for each other
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


def _keep(process: int, cores: set[int]) -> None:
    """Have all threads of a process run on these cores."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), cores)


def application_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Peak memory of the application while it deploys a model and calls it, over one that deployed a tiny one."""
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
