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
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
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
    from oslo_models.distributed.symmetric_memory import connect

    axis, x, found = ParallelMesh(2).tp, torch.zeros(8, 4096, device=device), {}
    own: Callable[[], Any] = lambda: all_reduce(axis, x)  # noqa: E731
    plain: Callable[[], Any] = lambda: dist.all_reduce(x, group=axis.group)  # noqa: E731
    later: Callable[[], Any] = lambda: dist.all_reduce(x, group=axis.group, async_op=True).wait()  # noqa: E731
    calls = [("a watched sum", own), ("torch: a sum", plain), ("torch: an asynchronous sum", later)]
    with suppress(ValueError):  # CPUs, and GPUs without access to each other's memory, have none
        connect(axis, device)
        calls.append(("a sum in symmetric memory", lambda: axis.symmetric_memory.sum(x)))
    for name, call in calls:
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


def wrappers(bench: Bench) -> None:
    """A step of two replicas in DDP and FSDP2 beside a step of one process with both batches."""
    if _has_gpus(bench):
        for name, error in _run(bench, steps_in_wrappers).items():
            _report(bench, name, error)


def steps_in_wrappers(device: torch.device) -> dict[str, float]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    from oslo_models import registry

    def in_ddp(model: Any) -> Any:
        return DistributedDataParallel(model.gpu_modules(), process_group=model.mpu.get_data_parallel_group())

    def in_fsdp(model: Any) -> Any:
        return fully_shard(model, mesh=model.mesh.device_mesh["dp"])

    found, ids = {}, ranks.batch(device)[:2]
    for kind in ranks.KINDS:
        config = ranks.plain(kind, torch.device("cpu")).config
        make = registry.find(ranks.KINDS[kind]).from_config_with_parallel
        _, expected = ranks.step(make(config, dtype=torch.float64, seed=0), ids)
        for name, wrap in (("DDP", in_ddp), ("FSDP2", in_fsdp)):
            model = make(config, dtype=torch.float64, seed=0)
            own = ids[dist.get_rank() :][:1]
            wrapped = wrap(model)  # DDP averages as long as it is alive
            wrapped(input_ids=own, labels=own).loss.backward()
            grads = {key: param.grad for key, param in model.named_parameters()}
            whole = {key: grad.full_tensor() if isinstance(grad, DTensor) else grad for key, grad in grads.items()}
            found[f"{kind} in {name}: gradients"] = max(ranks.error(whole[key], expected[key]) for key in expected)
    return found


def overlap(bench: Bench) -> None:
    """A tensor-parallel step in which sums of input gradients overlap with weight gradients, and the hidden time."""
    if not _has_gpus(bench):
        return
    bench.ready()
    found = _run(bench, overlapping_steps)
    _report(bench, "gradients with overlap", found.pop("error"))
    for name, seconds in found.items():
        bench.row(OURS, name, 1e3 * seconds, "ms")
    with_overlap, without, alone = found.values()
    bench.row(OURS, "hidden share of the sums' time", (without - with_overlap) / max(without - alone, 1e-9), "")


def overlapping_steps(device: torch.device) -> dict[str, float]:
    from transformers import LlamaConfig

    from oslo_models import LlamaForCausalLM
    from oslo_models.layers import overlap as own

    is_gpu = device.type == "cuda"
    width, rows = (4096, 4) if is_gpu else (64, 2)
    config = LlamaConfig(hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4, vocab_size=512,
                         num_attention_heads=width // 16, num_key_value_heads=width // 16)  # fmt: skip
    dtype = torch.bfloat16 if is_gpu else torch.float64
    model = LlamaForCausalLM.from_config_with_parallel(config, tensor_parallel_size=2, dtype=dtype, seed=0)
    ids = torch.randint(512, (rows, 1024 if is_gpu else 8), generator=torch.Generator().manual_seed(0)).to(device)

    def grads(overlaps: bool) -> dict[str, Tensor]:
        with patch.object(own, "overlaps", lambda axis, x: overlaps):
            model.zero_grad()
            return ranks.step(model, ids)[1]

    def seconds(overlaps: bool) -> float:
        times = []
        for _ in range(5):
            _synchronize(device)
            began = time.perf_counter()
            grads(overlaps)
            _synchronize(device)
            times.append(time.perf_counter() - began)
        return min(times)

    expected = {name: grad.clone() for name, grad in grads(False).items()}
    error = max(ranks.error(grad, expected[name]) for name, grad in grads(True).items())
    found = {"step with overlap": seconds(True), "step without overlap": seconds(False)}
    with patch.object(dist, "all_reduce", lambda *_, **__: SimpleNamespace(wait=lambda: None)):
        found["step without sums"] = seconds(False)
    return {"error": error, **found}


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
    """Seconds until the other rank names a rank that was killed between sums, or between steps of two stages."""
    if not _has_gpus(bench):
        return
    import oslo_models.modeling.construction  # noqa: F401  forked ranks have it

    bench.ready()
    for where in ("eager sums", "sums in a CUDA graph", "steps of two stages"):
        with bench.attempt(OURS, where), tempfile.TemporaryDirectory() as folder:
            if bench.dry and "graph" in where:
                bench.skip(OURS, "there are no CUDA graphs on a CPU")
                continue
            context = torch.multiprocessing.get_context("fork" if bench.dry else "spawn")
            gang = [
                context.Process(target=_mortal, args=(rank, bench.device, folder, where), daemon=True)
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


def _mortal(rank: int, device: torch.device, folder: str, where: str) -> None:
    from oslo_models import RankFailedError

    with ranks.group_of(rank, device, folder, several=True) as device:
        try:
            _run_forever(
                rank, device, folder, _step_of_stages(device) if "stages" in where else _sum(device, "graph" in where)
            )
        except RankFailedError as error:
            Path(folder, "said").write_text(json.dumps({"ranks": error.ranks, "at": time.time()}))
        os._exit(0)  # the group is unusable


def _sum(device: torch.device, in_graph: bool) -> Callable[[], Any]:
    from oslo_models.deploy.running_batch.graphs import CudaGraphs
    from oslo_models.distributed.collectives import all_reduce
    from oslo_models.distributed.mesh import ParallelMesh

    axis, x = ParallelMesh(2, timeout=5.0).tp, torch.zeros(1 << 20, device=device)

    def compute() -> Tensor:
        return all_reduce(axis, x)

    call: Callable[[], Any] = CudaGraphs(device, axis)(compute) if in_graph else compute
    return call


def _step_of_stages(device: torch.device) -> Callable[[], Any]:
    from oslo_models import registry

    config, ids = ranks.plain("llama", torch.device("cpu")).config, ranks.batch(device)
    make = registry.find(ranks.KINDS["llama"]).from_config_with_parallel
    model = make(config, pipeline_parallel_size=2, dtype=torch.float64, seed=0, timeout=5.0)
    return lambda: model.train_batch(input_ids=ids, labels=ids)


def _run_forever(rank: int, device: torch.device, folder: str, call: Callable[[], Any]) -> None:
    """Repeat the call until the other rank has died, or the limit is over."""
    deadline = time.monotonic() + LIMIT
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
