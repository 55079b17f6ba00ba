"""Training steps in bfloat16: forward, backward and torch's fused AdamW."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.models import build, config_of, weights

SIZES = {"gpt2-124m": (16, 1024), "llama-1b": (4, 2048), "llama-8b-width": (4, 2048)}
"""Rows and tokens of a batch."""
MFU = 0.5
"""The target of a fused Llama-1B."""


def train(bench: Bench, model: str, peer: str) -> None:
    """Time, tokens per second, share of the peak product, memory and launches of a step."""
    with bench.attempt(peer):
        config = config_of(bench, model)
        built = build(bench, model, peer, config).train()
        if peer == "Liger" and bench.dry:
            bench.skip(peer, "its kernels need a GPU")
            return
        batch, length = bench.pick(SIZES[model], (2, 8))
        ids = torch.randint(config.vocab_size, (batch, length), device=bench.device)
        recipe = "tensorwise" if "float8" in peer else None
        if "fused" in peer:
            _compare(bench, peer, built, ids, recipe)
        step = _stepper(bench, peer, built, ids)
        for _ in range(3):
            step()  # compiles
            bench.timer.synchronize()
        bench.ready()
        seconds = statistics.median(bench.timer.wall(step, 10))
        bench.row(peer, "step", seconds * 1e3, "ms")
        bench.row(peer, "training", ids.numel() / seconds, "tokens/s")
        share = _operations(built, config, batch, length) / seconds / bench.timer.ceilings().product
        target = MFU if (model, peer) == ("llama-1b", "oslo_models fused") and not bench.dry else None
        bench.row(peer, "MFU", share, "", target=target)
        bench.row(peer, "step, host", _host(bench, step) * 1e3, "ms")
        bench.row(peer, "peak memory beyond the weights", bench.timer.peak(step) / 1e6, "MB")
        bench.row(peer, "launches", bench.timer.launches(step), "")


def _stepper(bench: Bench, peer: str, model: Any, ids: torch.Tensor) -> Any:
    run = bench.compiled(model) if peer == "transformers compiled" else model
    if "fused and compiled" in peer:
        model.base_model.forward = bench.compiled(model.base_model.forward)  # head and loss are fused kernels
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        stepper.step()
        stepper.zero_grad()

    return step


def _compare(bench: Bench, peer: str, model: Any, ids: torch.Tensor, recipe: str | None) -> None:
    """Fuse the model. A different loss or gradient norm is a failure."""
    limit = 0.01 if recipe is None else 0.1

    def run() -> tuple[float, float]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = float(torch.nn.utils.get_total_norm([param.grad for param in model.parameters()]))
        model.zero_grad()
        return loss.item(), norm

    expected = run()
    model.fuse(float8=recipe)
    for name, own, exact in zip(("loss", "gradient norm"), run(), expected, strict=True):
        if abs(own - exact) > limit * abs(exact):
            bench.fail(peer, f"fused {own}, unfused {exact}", name)


def _operations(model: Any, config: Any, batch: int, length: int) -> float:
    """Return the operations of a step, without recomputation: six per weight and token, and causal attention."""
    tokens, width = batch * length, config.hidden_size
    return 6.0 * weights(model) * tokens + 6.0 * config.num_hidden_layers * length * width * tokens


def _host(bench: Bench, step: Any) -> float:
    """Return the seconds to launch a step. If they equal the time of the step, the device waits for the processor."""
    found = []
    for _ in range(3):
        bench.timer.synchronize()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    bench.timer.synchronize()
    return min(found)
