"""Two ranks with a GPU each, connected by NCCL: models, sums, steps in CUDA graphs, and a rank that dies.

With one GPU these cases are skipped by name. In a dry run the ranks are on the CPU and communicate through gloo.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.rehearse import ranks
from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.checks import OURS, _report

STEPS = 20
LIMIT = 60.0
"""Seconds in which the other rank has to name a rank that died."""


def _has_gpus(bench: Bench) -> bool:
    """Return whether two GPUs are here, or none is needed. Otherwise report that the case is skipped."""
    if bench.dry or torch.cuda.device_count() > 1:
        return True
    bench.skip(OURS, "one GPU: NCCL needs a GPU for each rank")
    return False


def _run(bench: Bench, work: Callable[[torch.device], dict[str, float]]) -> dict[str, float]:
    return ranks.launch(bench.device, work, several=True)


def models(bench: Bench) -> None:
    """Models on two ranks beside transformers' in float64."""
    if _has_gpus(bench):
        for name, error in _run(bench, ranks.compare_kinds).items():
            _report(bench, name, error)


def sums(bench: Bench) -> None:
    """Microseconds of a tensor-parallel sum as in decoding, watched and not, and of the host alone."""
    if not _has_gpus(bench):
        return
    bench.ready()
    for name, value in _run(bench, sums_of_ranks).items():
        bench.row("torch" if name.startswith("torch") else OURS, name, value, "us")


def sums_of_ranks(device: torch.device) -> dict[str, float]:
    from oslo_models.distributed.collectives import all_reduce
    from oslo_models.distributed.mesh import ParallelMesh

    axis, x, found = ParallelMesh(2).tp, torch.zeros(8, 4096, device=device), {}
    own: Callable[[], Any] = lambda: all_reduce(axis, x)  # noqa: E731
    plain: Callable[[], Any] = lambda: dist.all_reduce(x, group=axis.group)  # noqa: E731
    later: Callable[[], Any] = lambda: dist.all_reduce(x, group=axis.group, async_op=True).wait()  # noqa: E731
    for name, call in (("a watched sum", own), ("torch: a sum", plain), ("torch: an asynchronous sum", later)):
        for count in (20, 200):
            _synchronize(device)
            began = time.perf_counter()
            for _ in range(count):
                call()
            queued = time.perf_counter()
            _synchronize(device)
            found[f"{name}, host"] = 1e6 * (queued - began) / count
            found[name] = 1e6 * (time.perf_counter() - began) / count
    return found


def graphs(bench: Bench) -> None:
    """Decoding steps of the running batch that both ranks replay from CUDA graphs, beside eager steps."""
    if _has_gpus(bench):
        found = _run(bench, graphs_of_ranks)
        _report(bench, "logits of replayed steps", found["error"])
        bench.row(OURS, "graphs captured", found["graphs"], "")


def graphs_of_ranks(device: torch.device) -> dict[str, float]:
    from transformers import LlamaConfig

    from oslo_models import LlamaForCausalLM
    from oslo_models.deploy.running_batch import graphs as own
    from oslo_models.deploy.running_batch import step_runner
    from oslo_models.deploy.running_batch.limits import BatchLimits
    from oslo_models.deploy.running_batch.static_step import run_eagerly
    from oslo_models.deploy.running_batch.step import Step, WholePrompt

    config = LlamaConfig(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=101, initializer_range=0.1)  # fmt: skip
    model = LlamaForCausalLM.from_config_with_parallel(config, tensor_parallel_size=2, dtype=torch.float64, seed=0)
    model.eval()
    limits, runners = BatchLimits(4, 600, 64), []
    eager: Callable[[Any], Any] = lambda model: (None, "the reference")  # noqa: E731
    static = own.capture_of if device.type == "cuda" else lambda model: (run_eagerly, "")
    with patch.object(own, "OVER_RANKS", True), torch.no_grad():
        for capture in (static, eager):
            with patch.object(step_runner, "capture_of", capture):
                runners.append(step_runner.StepRunner(model, limits))
        error, tokens = 0.0, [5, 6, 7]
        prompts = [WholePrompt(number, 1, -1) for number in range(len(tokens))]
        for runner in runners:
            runner.run(Step(0, whole=prompts, chunk=tokens))
        for _ in range(STEPS):
            logits, expected = (runner.run(Step(0, tokens=tokens)) for runner in runners)
            assert logits is not None and expected is not None
            error = max(error, float((logits - expected).abs().max() / expected.abs().max()))
            tokens = expected.argmax(-1).tolist()
    return {"error": error, "graphs": float(len(runners[0].static or ()))}


def killed(bench: Bench) -> None:
    """Seconds until the other rank names a rank that was killed between sums: eager ones, and in a CUDA graph."""
    if not _has_gpus(bench):
        return
    import oslo_models.modeling.construction  # noqa: F401  forked ranks have it

    bench.ready()
    for where in ("eager sums", "sums in a CUDA graph"):
        with bench.attempt(OURS, where), tempfile.TemporaryDirectory() as folder:
            if bench.dry and "graph" in where:
                bench.skip(OURS, "there are no CUDA graphs on a CPU")
                continue
            context = torch.multiprocessing.get_context("fork" if bench.dry else "spawn")
            gang = [
                context.Process(target=_mortal, args=(rank, bench.device, folder, "graph" in where), daemon=True)
                for rank in range(2)
            ]
            for process in gang:
                process.start()
            for process in gang:
                process.join(2 * LIMIT)
                process.kill()
            said = Path(folder, "said")
            told = json.loads(said.read_text()) if said.exists() else {"ranks": "nothing", "at": 0.0}
            bench.check(f"{where}: named rank", told["ranks"], [1])
            bench.row(OURS, f"{where}: named after", told["at"] - float(Path(folder, "struck").read_text()), "s")


def _mortal(rank: int, device: torch.device, folder: str, in_graph: bool) -> None:
    from oslo_models import RankFailedError

    with ranks.group_of(rank, device, folder, several=True) as device:
        try:
            _sum_forever(rank, device, folder, in_graph)
        except RankFailedError as error:
            Path(folder, "said").write_text(json.dumps({"ranks": error.ranks, "at": time.time()}))
        os._exit(0)  # the group is unusable


def _sum_forever(rank: int, device: torch.device, folder: str, in_graph: bool) -> None:
    from oslo_models.deploy.running_batch.graphs import CudaGraphs
    from oslo_models.distributed.collectives import all_reduce
    from oslo_models.distributed.mesh import ParallelMesh

    axis, x = ParallelMesh(2, timeout=5.0).tp, torch.zeros(1 << 20, device=device)

    def compute() -> Tensor:
        return all_reduce(axis, x)

    call, deadline = CudaGraphs(device, axis)(compute) if in_graph else compute, time.monotonic() + LIMIT
    for number in range(1 << 30):
        if rank == 1 and number == 50:
            time.sleep(2.0)  # so that the other rank waits in a synchronisation
            Path(folder, "struck").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            call()
            _synchronize(device)
        except torch.AcceleratorError:  # of the aborted collective; the next one names the rank
            pass
        if time.monotonic() > deadline:
            return


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
