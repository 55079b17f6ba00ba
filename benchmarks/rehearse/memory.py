"""Large tensors, loading and saving, and running out of memory."""

from __future__ import annotations

import tempfile
import time
from typing import Any

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
    """A training step fits beside the static caches that generation has kept."""
    with bench.attempt(OURS):
        config = config_of(bench, "llama-1b")
        model = build(bench, "llama-1b", OURS, config).fuse()
        ids = torch.randint(config.vocab_size, (bench.pick(8, 2), bench.pick(512, 4)), device=bench.device)
        if bench.dry:
            model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
            return
        before = torch.cuda.memory_allocated()
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
        bench.row(OURS, "memory kept after generate / weights", (torch.cuda.memory_allocated() - before) / before, "")
