"""The language-model head and its cross entropy, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rehearse.bench import Bench

HEAD_MS = 1.3 * 50.4
"""The target at 8192 tokens, width 4096 and vocabulary 131072: 1.3 times the H100 figure in Liger's README."""


def head(bench: Bench, vocab: int) -> None:
    """8192 tokens of width 4096: time, share of the peak product, memory."""
    rows, width, tokens = bench.pick((8192, 4096, vocab), (16, 32, 67))
    peers = _peers(bench, *_inputs(bench, rows, width, tokens))
    bench.ready()
    operations = 6 * rows * width * tokens
    for peer, step in peers.items():
        target = HEAD_MS if (peer, tokens) == ("oslo_models", 131072) else None
        with bench.attempt(peer):
            seconds = bench.timer.seconds(step, graph=False)
            bench.row(peer, "forward and backward", seconds * 1e3, "ms", target=target)
            share = operations / seconds / bench.timer.ceilings().product
            bench.row(peer, "share of the peak product", share, "")
            bench.row(peer, "peak memory", bench.timer.peak(step) / 1e6, "MB")
            bench.row(peer, "launches", bench.timer.launches(step), "")


def narrow(bench: Bench, vocab: int) -> None:
    """Width 128: passes over the logits take most of the time. There, odd and even vocabularies differ."""
    rows, width, tokens = bench.pick((8192, 128, vocab), (16, 8, 67))
    peers = _peers(bench, *_inputs(bench, rows, width, tokens))
    bench.ready()
    # written by the product, read for statistics, read and written by the gradient, read by two products
    size = 6 * rows * tokens * 2
    for peer, step in peers.items():
        with bench.attempt(peer):
            seconds = bench.timer.seconds(step, graph=False)
            bench.row(peer, "forward and backward", seconds * 1e6, "us")
            bench.row(peer, "six passes, share of a copy", size / seconds / bench.timer.ceilings().copy, "")


def _inputs(bench: Bench, rows: int, width: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(rows, width, device=bench.device, dtype=torch.bfloat16).requires_grad_()
    w = (0.02 * torch.randn(tokens, width, device=bench.device)).bfloat16().requires_grad_()
    return x, w, torch.randint(tokens, (rows,), device=bench.device)


def _peers(bench: Bench, x: Tensor, w: Tensor, target: Tensor) -> dict[str, Callable[[], object]]:
    """Return a step by each peer that has the loss of eager torch."""
    from oslo_models.distributed.mesh import Axis
    from oslo_models.fusion.linear_cross_entropy import VocabShard, linear_cross_entropy

    shard = VocabShard(Axis("tp", 0, (0,), None), (0, len(w)), len(w))

    def eager(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).float(), target)

    losses: dict[str, Callable[..., Tensor]] = {
        "oslo_models": lambda x, w, target: linear_cross_entropy(x, w, None, target, shard) / len(x),
        "eager": eager,
        "Inductor": bench.compiled(eager),
    }
    if native := getattr(F, "linear_cross_entropy", None):  # in later versions of torch
        losses["torch"] = native
    with bench.attempt("Liger"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        if not bench.dry:
            losses["Liger"] = liger_fused_linear_cross_entropy
    with torch.no_grad():
        expected = eager(x, w, target).item()

    def step(loss: Callable[..., Tensor]) -> Tensor:
        found = loss(x, w, target)
        found.backward()
        x.grad = w.grad = None
        return found.detach()

    right: dict[str, Callable[[], object]] = {}
    for peer, loss in losses.items():
        with bench.attempt(peer):
            found = float(step(loss))
            if abs(found - expected) <= 0.01 * abs(expected):
                right[peer] = lambda loss=loss: step(loss)
            else:
                bench.fail(peer, f"wrong: loss {found} instead of {expected}")
    return right
