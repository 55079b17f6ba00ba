"""What is measured: one function per kind of case, called in every process of a peer."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers import Peer

# torch is imported by the processes that measure, not where the registry is only read.

UNITS = {
    "generation": "tokens/s",
    "training step": "s",
    "training": "tokens/s",
    "peak memory": "MB",
    "peak anonymous memory": "MB",
    "all-reduces a block, forward": "calls",
    "all-reduces a block, backward": "calls",
    "other collectives a block": "calls",
    "payload a block": "MB",
    "payload outside of blocks": "MB",
    "all-reduce": "us",
    "preprocessing": "tokens/s",
    "building": "s",
    "random access": "samples/s",
    "head and loss": "ms",
    "MLP": "ms",
    "optimizer step": "ms",
    "n-gram blocking": "us",
    "n-gram blocking, cold": "us",
    "forward and backward": "ms",
    "generation of a text": "ms",
    "start": "s",
    "call overhead": "ms",
    "serving": "tokens/s",
}


@dataclass
class Result:
    """What one process found.

    Attributes:
        values: by metric, in the units of ``UNITS``.
        check: what all peers have to agree on.
        references: values to compare with that are computed and not measured, by name and metric.
    """

    values: dict[str, float]
    check: list[float] = field(default_factory=list)
    references: dict[str, dict[str, float]] = field(default_factory=dict)


def generate(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, prompt: int, new: int, timed: int
) -> Result:
    """Greedy generation, after one run to warm up; the median of ``timed`` runs."""
    import torch

    model = peer.load(cls, checkpoint).eval()
    ids = tokens(model, batch, prompt)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    seconds = []
    for _ in range(timed + 1):
        start = time.perf_counter()
        out = model.generate(input_ids=ids, **options)
        seconds.append(time.perf_counter() - start)
    assert out.shape == (batch, prompt + new)
    return Result({"generation": batch * new / statistics.median(seconds[1:])}, out[:, prompt:].flatten().tolist())


def serve(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, clients: int, requests: int, prompt: int, new: int
) -> Result:
    """Greedy answers to ``requests`` different prompts of each of some threads, beside the same prompts one by one.

    Every answer has to be that of transformers in one process, to which the same prompts are given one by one too.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch
    import transformers as hf

    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}

    def seconds(model: Any, threads: int) -> tuple[float, list[Any]]:
        ids_NL = tokens(model, clients * requests, prompt)
        prompts = [ids_L[: prompt // 2 + i % (prompt // 2)].unsqueeze(0) for i, ids_L in enumerate(ids_NL)]

        def ask(first: int) -> list[Any]:
            mine = prompts[first::threads]
            return [model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **options) for ids in mine]

        ask(len(prompts) - 1)  # warms up
        start = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            answers = list(pool.map(ask, range(threads)))
        return time.perf_counter() - start, [answers[i % threads][i // threads] for i in range(len(prompts))]

    with peer.load(cls, checkpoint) as model:
        at_once, found = seconds(model, clients)
        one_by_one, single = seconds(model, 1)
    alone, right = seconds(getattr(hf, cls).from_pretrained(checkpoint).eval(), 1)
    for answers in (found, single):
        wrong = sum(not torch.equal(mine, theirs) for mine, theirs in zip(answers, right, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {len(right)} answers are not those of one process")
    total = clients * requests * new
    references = {"one by one": {"serving": total / one_by_one}, "transformers": {"serving": total / alone}}
    return Result({"serving": total / at_once}, [], references)


def _steps(step: Callable[[Any], Any], ids: Any, timed: int) -> tuple[list[float], list[float]]:
    """The seconds that each of ``timed`` steps takes after one to warm up, and the losses, of that one too."""
    seconds, losses = [], []
    for _ in range(timed + 1):
        start = time.perf_counter()
        losses.append(float(step(ids)))
        seconds.append(time.perf_counter() - start)
    return seconds[1:], losses


def train(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, timed: int) -> Result:
    """Forward, backward and AdamW, after one step to warm up; the median of ``timed`` steps."""
    model, step = peer.trainer(peer.load, cls, checkpoint)
    ids = tokens(model, batch, length)
    seconds, losses = _steps(step, ids, timed)
    return Result({"training step": statistics.median(seconds)}, losses[:2])


def train_in_stages(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int, timed: int
) -> Result:
    """As `train`, with a micro-batch for each row where there are stages; and the peak memory of one more step.

    The memory is that over a process that has trained a tiny model before: weights, gradients, AdamW and activations.
    """
    from benchmarks.instruments import PeakMemory

    model, step = peer.trainer(peer.load, cls, tiny)
    step(tokens(model, batch, 8))
    del model, step
    memory = PeakMemory()
    model, step = peer.trainer(peer.load, cls, checkpoint)
    ids = tokens(model, batch, length)
    seconds, losses = _steps(step, ids, timed)
    with memory.watched():
        step(ids)
    speed = batch * length / statistics.median(seconds)
    return Result({"training": speed, **memory.growth}, losses[:2])


def load_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Peak memory of loading, weights touched, over that of a process that has loaded a tiny model before."""
    from benchmarks.instruments import PeakMemory, local

    peer.load(cls, tiny)
    memory = PeakMemory()
    with memory.watched():
        for param in peer.load(cls, checkpoint).parameters():
            local(param).detach().sum()
    size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")) / 1e6
    return Result(memory.growth, [], {"checkpoint": dict.fromkeys(memory.growth, size)})


def merge_memory(peer: Peer, cls: str, checkpoint: Path, tiny: Path) -> Result:
    """Peak memory while one merged checkpoint is saved, the model's own included."""
    from safetensors import safe_open

    from benchmarks.instruments import PeakMemory, local

    merged = checkpoint.parent / f"merged-{peer.name}"
    peer.save(peer.load(cls, tiny), merged)
    memory = PeakMemory()
    model = peer.load(cls, checkpoint)
    shard = 0
    for param in model.parameters():
        part = local(param)
        part.data = part.data.clone()  # memory of its own, if it was pages of the checkpoint's file
        shard += part.nbytes
    with memory.watched():
        peer.save(model, merged)
    with safe_open(next(checkpoint.glob("*.safetensors")), "pt") as file:
        largest = max(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
    bound = (shard + largest) / 1e6
    return Result(memory.growth, [], {"shard + largest tensor": dict.fromkeys(memory.growth, bound)})


def collectives(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, batch: int, length: int) -> Result:
    """Collectives of a training step, counted with one and with two blocks: the difference is what a block costs.

    Megatron-LM's figures are those of Shoeybi et al., 2019: two all-reduces of the hidden states each way.
    """
    from benchmarks.instruments import Collectives

    counts = []
    for blocks in (1, 2):
        model = peer.load(cls, checkpoint, num_hidden_layers=blocks).train()
        ids = tokens(model, batch, length)
        with Collectives() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with Collectives() as backward:
            loss.backward()
        both = (forward.others + backward.others, forward.megabytes + backward.megabytes)
        counts.append((forward.all_reduces, backward.all_reduces, *both))
    block = [two - one for one, two in zip(*counts, strict=True)]
    names = [name for name in UNITS if "a block" in name or "of blocks" in name]
    values = dict(zip(names, (*block, counts[0][-1] - block[-1]), strict=True))
    hidden = batch * length * model.config.hidden_size * 4 / 1e6
    return Result(values, [], {"Megatron-LM": dict(zip(values, (2, 2, 0, 4 * hidden), strict=False))})


def all_reduce(peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, kilobytes: int, timed: int) -> Result:
    """The median of ``timed`` sums of a float32 tensor, ours and gloo's one after the other."""
    import torch
    import torch.distributed as dist

    from oslo_models.distributed.collectives import all_reduce
    from oslo_models.distributed.mesh import ParallelMesh

    axis, x = ParallelMesh(peer.processes).tp, torch.zeros(kilobytes * 256)

    def median(reduce: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(timed + 10):  # the first ones warm up
            start = time.perf_counter()
            reduce()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[10:]) * 1e6

    gloo = median(lambda: dist.all_reduce(x, group=axis.group))
    return Result({"all-reduce": median(lambda: all_reduce(axis, x))}, [], {"gloo": {"all-reduce": gloo}})


def tokens(model: Any, batch: int, length: int) -> Any:
    """The same random token ids in every process."""
    import torch

    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (batch, length), generator=generator)
