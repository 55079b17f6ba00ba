"""Benchmarks on one GPU: ``python -m benchmarks.gpu`` takes a few minutes and appends to ``benchmarks/results.csv``.

Kernels are reported as a share of the bandwidth of a copy; head and loss, training steps and decoding as times.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.records import RESULTS, append, number, stamp

Measurement = tuple[str, str, str, str, float]
"""Case, peer, metric, unit and value."""


def milliseconds(run: Callable[[], Any], timed: int = 20) -> float:
    """The median time of a call on the device, after three warm-up calls."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(timed):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def kernels() -> Iterator[Measurement]:
    """Bandwidth of each kernel as a share of a copy's, on tensors too large for the caches."""
    from oslo_kernels import dropout, gelu, norm, rotary, softmax, swiglu

    source = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda: target.copy_(source))
    yield "gpu-copy", "torch", "bandwidth", "GB/s", copied / 1e6

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    x, y, dy, bias = made(16384, 8192), made(16384, 8192), made(16384, 8192), made(8192)
    h, r, dh, w = made(16384, 2048), made(16384, 2048), made(16384, 2048), made(2048)
    scores, q = made(8, 16, 1024, 1024), made(16, 32, 2048, 64)
    cos, sin = made(2, 1, 2048, 64)
    weights = softmax.masked_softmax(scores, None, 0.1, True)
    _, summed, kept = norm.add_norm(h, r, w, w, 1e-5, True)
    cases: list[tuple[str, Callable[[], Any], int]] = [
        ("bias-gelu", lambda: gelu.bias_gelu(x, bias, "tanh"), 2 * x.nbytes),
        ("bias-gelu-backward", lambda: gelu.bias_gelu_backward(dy, x, bias, "tanh"), 3 * x.nbytes),
        ("swiglu", lambda: swiglu.swiglu(x, y), 3 * x.nbytes),
        ("swiglu-backward", lambda: swiglu.swiglu_backward(dy, x, y), 5 * x.nbytes),
        ("dropout-residual", lambda: dropout.bias_dropout_residual(x, bias, y, 0.1, 7), 3 * x.nbytes),
        ("dropout-backward", lambda: dropout.dropout_backward(dy, 0.1, 7), 2 * x.nbytes),
        ("residual-layernorm", lambda: norm.add_norm(h, r, w, w, 1e-5, True), 4 * h.nbytes),
        ("rmsnorm", lambda: norm.add_norm(h, None, w, None, 1e-5, False), 2 * h.nbytes),
        ("layernorm-backward", lambda: norm.add_norm_backward(dh, None, summed, kept, w, True), 3 * h.nbytes),
        ("masked-softmax", lambda: softmax.masked_softmax(scores, None, 0.1, True), 2 * scores.nbytes),
        ("softmax-backward", lambda: softmax.softmax_backward(scores, weights, 0.1), 3 * scores.nbytes),
        ("rotary", lambda: rotary.rotary(q, cos, sin), 2 * q.nbytes),
    ]
    for name, run, size in cases:
        yield f"gpu-{name}", "oslo_models", "share of a copy's bandwidth", "", size / milliseconds(run) / copied


def epilogues() -> Iterator[Measurement]:
    """A linear layer and its tanh GeLU without gradients: GeLU in the epilogue of the product, and after it."""
    from transformers.pytorch_utils import Conv1D

    from oslo_models.fusion.modules import _gelu_of_linear

    layer = Conv1D(8192, 2048).to("cuda", torch.bfloat16)
    x = torch.randn(16384, 2048, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        fused = milliseconds(lambda: _gelu_of_linear(layer, x, "tanh"))
        yield "gpu-linear-gelu", "oslo_models", "MLP", "ms", fused
        yield "gpu-linear-gelu", "torch", "MLP", "ms", milliseconds(lambda: F.gelu(layer(x), approximate="tanh"))


def losses() -> Iterator[Measurement]:
    """Head and cross entropy of GPT-2's vocabulary, forward and backward, with peak memory."""
    from oslo_models.distributed.mesh import Axis
    from oslo_models.fusion.linear_cross_entropy import VocabShard, linear_cross_entropy

    rows, hidden, vocab = 8192, 2048, 50257
    x = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = (0.02 * torch.randn(vocab, hidden, device="cuda")).bfloat16().requires_grad_()
    target = torch.randint(vocab, (rows,), device="cuda")
    words = VocabShard(Axis("tp", 0, (0,), None), (0, vocab), vocab)
    peers: dict[str, Callable[[], Tensor]] = {
        "oslo_models": lambda: linear_cross_entropy(x, w, None, target, words) / rows,
        "torch": lambda: F.cross_entropy(F.linear(x, w).float(), target),
        "torch.compile": torch.compile(lambda: F.cross_entropy(F.linear(x, w).float(), target)),
    }
    try:
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy as liger

        peers["liger"] = lambda: liger(x, w, target)
    except ImportError:
        print("liger is skipped: not installed")
    for name, run in peers.items():

        def step(run: Callable[[], Tensor] = run) -> None:
            run().backward()
            x.grad = w.grad = None

        taken = milliseconds(step)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.max_memory_allocated() - before
        yield "gpu-loss", name, "head and loss", "ms", taken
        yield "gpu-loss", name, "peak memory", "MB", peak / 1e6


def models() -> Iterator[Measurement]:
    """`training` and `decoding` of GPT-2 and of a Llama with a billion parameters."""
    from transformers import GPT2Config, LlamaConfig

    from oslo_models import GPT2LMHeadModel, LlamaForCausalLM

    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    llama = LlamaConfig(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_key_value_heads=8, **none)
    gpt2 = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **none)
    for case, cls, config in (("gpt2-124m", GPT2LMHeadModel, gpt2), ("llama-1b", LlamaForCausalLM, llama)):
        model = cls.from_config_with_parallel(config, dtype=torch.bfloat16, seed=0).cuda()
        ids = torch.randint(config.vocab_size, (8, 1024), device="cuda")
        yield from training(f"gpu-train-{case}", model, ids)
        for batch in (1, 8):
            yield from decoding(f"gpu-generate-{case}-b{batch}", model.eval(), ids[:batch, :32])
        del model
        yield from training_by_liger(f"gpu-train-{case}", config, ids)
        torch.cuda.empty_cache()


def training(case: str, model: Any, ids: Tensor) -> Iterator[Measurement]:
    """Forward and backward in bfloat16."""

    def step(run: Any) -> None:
        run(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    model.train()
    for peer in ("unfused", "oslo_models", "torch.compile"):
        (model.fuse if peer == "oslo_models" else model.unfuse)()
        run = torch.compile(model) if peer == "torch.compile" else model
        yield case, peer, "forward and backward", "ms", milliseconds(lambda run=run: step(run), 5)


def training_by_liger(case: str, config: Any, ids: Tensor) -> Iterator[Measurement]:
    """`training` of transformers' model with Liger's kernels; last, since it patches transformers' modules for good."""
    from transformers import AutoModelForCausalLM

    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance as patch
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN as KNOWN
    except ImportError:
        print(f"{case}: liger is skipped: not installed")
        return
    if config.model_type not in KNOWN:
        return
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda().train()
    patch(model=model)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    yield case, "liger", "forward and backward", "ms", milliseconds(step, 5)


def decoding(case: str, model: Any, ids: Tensor) -> Iterator[Measurement]:
    """Greedy generation: transformers' default, ours (static cache and CUDA graphs), transformers' static cache."""
    options = {"min_new_tokens": 128, "max_new_tokens": 128, "do_sample": False, "pad_token_id": 0}
    static = {"cache_implementation": "static"}
    for peer, more in (("unfused", {}), ("oslo_models", {}), ("unfused, static cache", static)):
        (model.fuse if peer == "oslo_models" else model.unfuse)()
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            model.generate(input_ids=ids, **options, **more)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        yield case, peer, "generation", "tokens/s", len(ids) * 128 / min(seconds)


def main() -> int:
    """Measure everything; the exit code is 1 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--out", metavar="FILE", type=Path, default=RESULTS, help="where rows are appended")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing measured", file=sys.stderr)
        return 1
    header = {**stamp(), "machine": torch.cuda.get_device_name()}
    for part in (kernels, epilogues, losses, models):
        rows = []
        for case, peer, metric, unit, value in part():
            shown = number(value)
            print(f"{case:28}{peer:20}{metric:30}{shown:>8} {unit}", flush=True)
            row = {"case": case, "peer": peer, "processes x threads": "1 GPU", "metric": metric, "unit": unit}
            rows.append({**header, **row, "value": shown, "min": shown, "max": shown, "repeats": 1})
        append(args.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
