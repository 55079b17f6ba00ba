"""Large tensors, loading and saving, and running out of memory."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from benchmarks.rehearse.bench import Bench
from benchmarks.rehearse.models import build, config_of

OURS = "oslo_models"


def large(bench: Bench) -> None:
    """Operations on more than 2^31 elements, which need 64-bit offsets: the last rows beside the same rows alone."""
    from oslo_kernels import gated, norm

    rows, width = bench.pick((1 << 19) + 64, 64), bench.pick(4096, 16)
    x = torch.empty(rows, width, device=bench.device, dtype=torch.bfloat16).normal_()
    w = torch.randn(width, device=bench.device, dtype=torch.bfloat16)
    last = x[-32:].clone()
    runs: dict[str, Any] = {
        "rmsnorm": lambda t: norm.add_norm(t, None, w, None, 1e-5, False)[0],
        "swiglu": lambda t: gated.gated(t, t),
    }
    for name, run in runs.items():
        with bench.attempt(OURS, name), torch.no_grad():
            bench.check(f"{name}: {x.numel()} elements", run(x)[-32:], run(last), 1e-6)


def loading(bench: Bench) -> None:
    """Seconds and peak memory of loading and saving a model in bfloat16."""
    import oslo_models

    with bench.attempt(OURS), tempfile.TemporaryDirectory() as folder:
        name = bench.pick("llama-1b", "llama-1b")
        model = build(bench, name, OURS, config_of(bench, name))
        bytes_held = sum(param.numel() * param.element_size() for param in model.parameters())
        bench.timer.synchronize()
        start = time.perf_counter()
        model.save_pretrained_with_parallel(folder, save_with_merging=True)
        saving = time.perf_counter() - start
        sums = {name: param.float().sum().item() for name, param in model.named_parameters()}
        del model
        found: list[Any] = []
        bench.ready()

        def load() -> None:
            cls = oslo_models.LlamaForCausalLM
            found[:] = [cls.from_pretrained_with_parallel(folder, dtype=torch.bfloat16)]

        seconds = min(bench.timer.wall(load, 2))
        found.clear()
        peak = bench.timer.peak(load)
        bench.row(OURS, "save, 16-bit weights from the device", bytes_held / saving / 1e9, "GB/s")
        bench.row(OURS, "load to the device", bytes_held / seconds / 1e9, "GB/s")
        bench.row(OURS, "peak memory of loading / weights", peak / bytes_held, "")
        again = {name: param.float().sum().item() for name, param in found[0].named_parameters()}
        bench.check("sums of weights", again, sums)


def kept_caches(bench: Bench) -> None:
    """A training step, and a call that runs out of memory, release the static caches that generation has kept."""
    with bench.attempt(OURS):
        config = config_of(bench, "llama-1b")
        model = build(bench, "llama-1b", OURS, config).fuse().eval()
        ids = torch.randint(config.vocab_size, (bench.pick(8, 2), bench.pick(512, 4)), device=bench.device)
        before = _allocated(bench)
        tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        if not bench.dry:
            bench.check("a cache is kept", _kept(model), 1)
            bench.row(OURS, "memory kept after generate / weights", (_allocated(bench) - before) / before, "")
        model.train()
        model(input_ids=ids, labels=ids).loss.backward()
        bench.check("caches kept beside a training step", _kept(model), 0)
        model.zero_grad()
        model.eval()
        bench.check("tokens after a training step", _tokens(model, ids), tokens.tolist())
        larger = ids.repeat(bench.pick(64, 2), 1)
        with _little_memory(bench, model):
            try:
                model.generate(larger, max_new_tokens=4, do_sample=False, pad_token_id=0)
                bench.fail(OURS, "it did not raise", "a call without memory")
            except torch.OutOfMemoryError:
                bench.check("caches kept after a call without memory", _kept(model), 0)
        bench.check("tokens after a call without memory", _tokens(model, ids), tokens.tolist())


def _tokens(model: Any, ids: torch.Tensor) -> list[list[int]]:
    tokens: list[list[int]] = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    return tokens


def _kept(model: Any) -> int:
    return 0 if model._decoders is None else len(model._decoders._kept)


def _allocated(bench: Bench) -> int:
    return 0 if bench.dry else torch.cuda.memory_allocated()


@contextmanager
def _little_memory(bench: Bench, model: Any) -> Iterator[None]:
    """Limit this process to the memory that it holds already. In a dry run, every forward runs out of memory."""
    if bench.dry:
        with mock.patch.object(type(model.base_model), "forward", side_effect=torch.OutOfMemoryError):
            yield
        return
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(bench.device).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
