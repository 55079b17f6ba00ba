"""Fused operations on tensors larger than all caches, beside eager torch, Inductor and Liger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rehearse.bench import Bench

FORWARD, BACKWARD = 0.85, 0.75
"""Targets of `oslo_models`: shares of the bandwidth of a copy."""
ERROR = 0.02
"""Maximum difference of gradients and results in bfloat16 from eager torch, relative to the largest element."""
Peers = dict[str, Callable[..., Any]]


@dataclass
class Operation:
    """One operation by each peer.

    Attributes:
        tensors: Arguments. Floating-point tensors need gradients, unless their names are in ``constants``.
        forward, backward: Minimum bytes that each pass has to move.
        liger: Imports Liger and returns its function.
    """

    ours: Callable[..., Any]
    eager: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    forward: int
    backward: int
    liger: Callable[[], Callable[..., Any]] | None = None
    comparable: bool = True

    def peers(self, bench: Bench) -> Peers:
        """The functions by peer."""
        found = {"oslo_models": self.ours, "eager": self.eager, "Inductor": bench.compiled(self.eager, dynamic=False)}
        if self.liger is not None:
            with bench.attempt("Liger"):
                function = self.liger()
                found["Liger"] = self.eager if bench.dry else function  # its kernels need a GPU
        return found


def make(bench: Bench, *shape: int, grad: bool = True) -> Tensor:
    return torch.randn(*shape, device=bench.device, dtype=torch.bfloat16).requires_grad_(grad)


def _norm(bench: Bench, rows: int, centered: bool, residual: bool, width: int = 4096) -> Operation:
    from oslo_kernels import norm

    width = min(width, rows)
    x, w = make(bench, rows, width), make(bench, width)
    r, b = (make(bench, rows, width) if residual else None), (make(bench, width) if centered else None)
    n = x.nbytes

    def ours(x: Tensor, w: Tensor, *more: Tensor) -> Any:
        own = list(more)
        r, b = (own.pop(0) if residual else None), (own.pop(0) if centered else None)
        y, summed, _ = norm.add_norm(x, r, w, b, 1e-5, centered)
        return (y, summed) if residual else y

    def eager(x: Tensor, w: Tensor, *more: Tensor) -> Any:
        own = list(more)
        summed = x + own.pop(0) if residual else x
        if centered:
            y = F.layer_norm(summed, (width,), w, own[0], 1e-5)
        else:  # as transformers does it
            h = summed.float()
            y = w * (h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).to(x.dtype)
        return (y, summed) if residual else y

    def liger() -> Callable[..., Any]:
        from liger_kernel.transformers import functional

        if residual:
            return lambda x, w, r: functional.liger_fused_add_rms_norm(x, r, w, 1e-5, in_place=False)
        if centered:
            return lambda x, w, b: functional.liger_layer_norm(x, w, b, 1e-5)
        return lambda x, w: functional.liger_rms_norm(x, w, 1e-5, in_place=False)

    tensors = tuple(t for t in (x, w, r, b) if t is not None)
    # the sum is written once and read by the backward pass; with a residual there is a second incoming gradient
    forward, backward = (4 * n, 4 * n) if residual else (2 * n, 3 * n)
    return Operation(ours, eager, tensors, forward, backward, None if residual and centered else liger)


def _norm_and_sum(bench: Bench, rows: int) -> Operation:
    """The residual of OLMo 2, which is added after the norm."""
    from oslo_kernels import norm

    width = min(4096, rows)
    x, r, w = make(bench, rows, width), make(bench, rows, width), make(bench, width)

    def eager(x: Tensor, r: Tensor, w: Tensor) -> Tensor:  # as transformers does it
        h = x.float()
        return r + (w * (h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt())).to(x.dtype)

    n = x.nbytes
    return Operation(lambda x, r, w: norm.norm_add(x, r, w, 1e-6, 0.0, True)[0], eager, (x, r, w), 3 * n, 3 * n)


def _sum_of_three(bench: Bench, rows: int) -> Operation:
    """MLP, attention and residual of GPT-NeoX. Their gradients equal the incoming gradient."""
    from oslo_kernels import sums

    tensors = tuple(make(bench, rows, 4096) for _ in range(3))
    n = tensors[0].nbytes
    return Operation(sums.sum_of_three, lambda x, y, z: x + y + z, tensors, 4 * n, 0)


def _gated(bench: Bench, rows: int, activation: str, packed: bool) -> Operation:
    from oslo_kernels import gated

    def act(x: Tensor) -> Tensor:
        return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")

    def liger() -> Callable[..., Any]:
        from liger_kernel.transformers import functional

        return functional.liger_swiglu if activation == "silu" else functional.liger_geglu

    if packed:
        x = make(bench, rows // 2, 16384)
        n = x.nbytes // 2
        return Operation(
            lambda x: gated.gated_packed(x, activation), lambda x: act(x[..., :8192]) * x[..., 8192:], (x,), 3 * n,
            5 * n,
        )  # fmt: skip
    gate, up = make(bench, rows, 8192), make(bench, rows, 8192)
    n = gate.nbytes
    return Operation(
        lambda g, u: gated.gated(g, u, activation), lambda g, u: act(g) * u, (gate, up), 3 * n, 5 * n, liger
    )


def _gelu(bench: Bench, rows: int) -> Operation:
    from oslo_kernels import gelu

    x, bias = make(bench, rows, 8192), make(bench, 8192)
    n = x.nbytes
    return Operation(
        lambda x, b: gelu.bias_gelu(x, b, "tanh"), lambda x, b: F.gelu(x + b, approximate="tanh"), (x, bias), 2 * n,
        3 * n,
    )  # fmt: skip


def _rotary(bench: Bench, rows: int) -> Operation:
    """Queries and keys of Llama-8B, as its projections lay them out."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    from oslo_kernels import rotary

    length = max(4, rows // 8)
    q, k = (make(bench, 8, length, heads, 128).detach().transpose(1, 2).requires_grad_() for heads in (32, 8))
    angle = torch.rand(1, length, 64, device=bench.device).repeat(1, 1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()

    def liger() -> Callable[..., Any]:
        from liger_kernel.transformers.functional import liger_rope

        return lambda q, k: liger_rope(q, k, cos, sin)  # in place

    n = q.nbytes + k.nbytes
    return Operation(
        lambda q, k: rotary.rotary(q, k, cos, sin),
        lambda q, k: apply_rotary_pos_emb(q, k, cos, sin), (q, k), 2 * n, 2 * n, liger,
    )  # fmt: skip


def _normed_rotary(bench: Bench, rows: int) -> Operation:
    """Queries and keys of Qwen3-8B, with norms of single heads."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    from oslo_kernels import normed_rotary

    length = max(4, rows // 8)
    q, k = (make(bench, 8, length, heads, 128).detach().transpose(1, 2).requires_grad_() for heads in (32, 8))
    angle = torch.rand(1, length, 64, device=bench.device).repeat(1, 1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    n = q.nbytes + k.nbytes

    def normed(x: Tensor, weight: Tensor) -> Tensor:  # as transformers does it
        h = x.float()
        return weight * (h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)

    return Operation(
        lambda q, k, *weights: normed_rotary.normed_rotary(q, k, cos, sin, *weights, 1e-6)[:2],
        lambda q, k, *weights: apply_rotary_pos_emb(normed(q, weights[0]), normed(k, weights[1]), cos, sin),
        (q, k, make(bench, 128), make(bench, 128)), 2 * n, 3 * n,
    )  # fmt: skip


def _full_norm_rotary(bench: Bench, rows: int) -> Operation:
    """Queries and keys of OLMo 2 32B, with norms over all heads, on a rank with all heads."""
    from transformers.models.olmo2.modeling_olmo2 import apply_rotary_pos_emb

    from oslo_models.distributed.mesh import Axis
    from oslo_models.fusion.full_norms import FullNorms, norm_and_rotate_heads

    length = max(4, rows // 8)
    q, k = (make(bench, 8, length, heads, 128).detach().transpose(1, 2).requires_grad_() for heads in (40, 8))
    angle = torch.rand(1, length, 64, device=bench.device).repeat(1, 1, 2)
    cos, sin, n = angle.cos(), angle.sin(), q.nbytes + k.nbytes
    ours = FullNorms(Axis("tp", 0, (0,), None), (40 * 128, 8 * 128), 1e-6, 0.0, True)

    def normed(x: Tensor, weight: Tensor) -> Tensor:  # as transformers does it
        h = x.transpose(1, 2).flatten(2).float()
        h = (weight * (h * (h.square().mean(-1, keepdim=True) + 1e-6).rsqrt())).to(x.dtype)
        return h.view(x.transpose(1, 2).shape).transpose(1, 2)

    return Operation(
        lambda q, k, *weights: norm_and_rotate_heads(ours, q, k, cos, sin, *weights),
        lambda q, k, *weights: apply_rotary_pos_emb(normed(q, weights[0]), normed(k, weights[1]), cos, sin),
        (q, k, make(bench, 40 * 128), make(bench, 8 * 128)), 2 * n, 3 * n,
    )  # fmt: skip


def _softmax(bench: Bench, rows: int, causal: bool) -> Operation:
    from oslo_kernels import softmax

    length = min(1024, rows)
    scores = make(bench, 8, 16, length, length)
    mask = torch.zeros(8, 1, 1, length, device=bench.device, dtype=torch.bfloat16)
    mask[..., : length // 8] = torch.finfo(torch.bfloat16).min
    hidden = torch.full((length, length), torch.finfo(torch.bfloat16).min, device=bench.device).triu(1).bfloat16()

    def eager(scores: Tensor) -> Tensor:
        return (scores * 0.1 + (hidden if causal else mask)).softmax(-1)

    n = scores.nbytes
    return Operation(
        lambda s: softmax.masked_softmax(s, None if causal else mask, 0.1, causal), eager, (scores,), 2 * n, 3 * n
    )


def _dropout(bench: Bench, rows: int) -> Operation:
    from oslo_kernels import dropout

    x, residual, bias = make(bench, rows, 8192), make(bench, rows, 8192), make(bench, 8192)
    n = x.nbytes
    # the gradient of the residual equals the incoming gradient
    return Operation(
        lambda x, r, b: dropout.bias_dropout_residual(x, b, r, 0.1, 7), lambda x, r, b: r + F.dropout(x + b, 0.1),
        (x, residual, bias), 3 * n, 2 * n, comparable=False,
    )  # fmt: skip


OPERATIONS: dict[str, tuple[Callable[..., Operation], dict[str, Any], int]] = {
    # builder, further arguments, rows for tensors of 256 MB
    "rmsnorm": (_norm, {"centered": False, "residual": False}, 32768),
    "add-rmsnorm": (_norm, {"centered": False, "residual": True}, 32768),
    "add-rmsnorm-16384": (_norm, {"centered": False, "residual": True, "width": 16384}, 16384),
    "rmsnorm-add": (_norm_and_sum, {}, 32768),
    "sum-of-three": (_sum_of_three, {}, 32768),
    "layernorm": (_norm, {"centered": True, "residual": False}, 32768),
    "add-layernorm": (_norm, {"centered": True, "residual": True}, 32768),
    "swiglu": (_gated, {"activation": "silu", "packed": False}, 16384),
    "geglu": (_gated, {"activation": "gelu_tanh", "packed": False}, 16384),
    "packed-swiglu": (_gated, {"activation": "silu", "packed": True}, 32768),
    "bias-gelu": (_gelu, {}, 16384),
    "rotary": (_rotary, {}, 32768),
    "head-norms-rotary": (_normed_rotary, {}, 32768),
    "full-norms-rotary": (_full_norm_rotary, {}, 32768),
    "masked-softmax": (_softmax, {"causal": False}, 16384),
    "causal-softmax": (_softmax, {"causal": True}, 16384),
    "dropout-residual": (_dropout, {}, 16384),
}


def operation(bench: Bench, name: str) -> None:
    """Bandwidths of both passes, and the host time of a call on small tensors."""
    build, options, rows = OPERATIONS[name]
    large = build(bench, bench.pick(rows, 16), **options)
    small = build(bench, 16, **options)
    peers = _correct(bench, large)
    on_small = small.peers(bench)  # eager functions have the sizes of their tensors
    for peer in peers:
        with bench.attempt(peer):
            _step(on_small[peer], small)()  # compiles
    bench.ready()
    copy = bench.timer.ceilings().copy
    for peer, run in peers.items():
        targets: tuple[Any, Any] = (FORWARD, BACKWARD) if peer == "oslo_models" and not bench.dry else (None, None)
        with bench.attempt(peer):
            _host(bench, peer, on_small[peer], small)
            there = bench.timer.seconds(lambda run=run: run(*large.tensors))
            _moved(bench, peer, "forward", there, large.forward, copy, targets[0])
            if not large.backward:  # no kernel
                continue
            both = bench.timer.seconds(_step(run, large))
            _moved(bench, peer, "backward", max(both - there, 1e-9), large.backward, copy, targets[1])


def _correct(bench: Bench, large: Operation) -> Peers:
    """Return the peers with the results and gradients of eager torch."""
    peers, right, grads = large.peers(bench), {}, {}
    seeds = [torch.randn_like(y) for y in _tuple(large.eager(*large.tensors))]
    for peer in sorted(peers, key=lambda peer: peer != "eager"):
        with bench.attempt(peer):
            leaves = [x.detach().clone().requires_grad_() for x in large.tensors]  # Liger computes in place
            out = _tuple(peers[peer](*leaves))
            grads[peer] = [*out, *torch.autograd.grad(out, leaves, [seed.clone() for seed in seeds])]
            errors = [_error(x, y) for x, y in zip(grads[peer], grads["eager"], strict=True)]
            if peer != "eager":
                del grads[peer]
            if large.comparable and not max(errors) < ERROR:
                bench.fail(peer, f"wrong: {', '.join(f'{error:.1e}' for error in errors)} from eager torch")
            else:
                right[peer] = peers[peer]
    return {peer: right[peer] for peer in peers if peer in right}


def _error(x: Tensor, y: Tensor) -> float:
    x, y = x.detach().float(), y.detach().float()
    return float((x - y).abs().max() / y.abs().max().clamp_min(1e-30))


def _tuple(out: Any) -> tuple[Tensor, ...]:
    return (out,) if isinstance(out, Tensor) else tuple(out)


def _step(run: Callable[..., Any], large: Operation) -> Callable[[], Any]:
    seeds = [torch.randn_like(y) for y in _tuple(run(*large.tensors))]
    return lambda: torch.autograd.grad(_tuple(run(*large.tensors)), large.tensors, seeds)


def _moved(bench: Bench, peer: str, metric: str, seconds: float, size: int, copy: float, target: float | None) -> None:
    bench.row(peer, metric, seconds * 1e6, "us")
    bench.row(peer, f"{metric}, bandwidth", size / seconds / 1e9, "GB/s")
    bench.row(peer, f"{metric}, share of a copy", size / seconds / copy, "", target=target)


def _host(bench: Bench, peer: str, run: Callable[..., Any], small: Operation) -> None:
    step = _step(run, small)
    bench.row(peer, "forward, host", bench.timer.host(lambda: run(*small.tensors)) * 1e6, "us")
    bench.row(peer, "forward and backward, host", bench.timer.host(step) * 1e6, "us")


def mlp(bench: Bench) -> None:
    """GPT-2's MLP without gradients: GeLU in the epilogue of the product, and after it."""
    from transformers import GPT2Config

    from oslo_models import GPT2LMHeadModel

    width, rows = bench.pick((2048, 16384), (32, 16))
    config = GPT2Config(n_embd=width, n_layer=1, n_head=8, vocab_size=64)
    model = GPT2LMHeadModel.from_config_with_parallel(config, dtype=torch.bfloat16, seed=0).eval()
    x = make(bench, 1, rows, width, grad=False)
    layer = model.transformer.h[0].mlp
    run = bench.compiled(layer)
    with torch.no_grad():
        run(x)
        bench.ready()
        for peer in ("eager", "Inductor", "oslo_models"):
            with bench.attempt(peer):
                if peer == "oslo_models":
                    model.fuse()
                seconds = bench.timer.seconds(lambda peer=peer: (run if peer == "Inductor" else layer)(x))
                bench.row(peer, "forward", seconds * 1e6, "us")
                share = 16 * rows * width * width / seconds / bench.timer.ceilings().product
                bench.row(peer, "share of the peak product", share, "")


def ngrams(bench: Bench) -> None:
    """Blocking repeated n-grams of 32 texts with 1024 tokens."""
    from transformers import NoRepeatNGramLogitsProcessor

    from oslo_kernels.ngrams import block_repeats_

    batch, length, vocab = bench.pick((32, 1024, 50257), (2, 16, 32))
    ids = torch.randint(vocab, (batch, length), device=bench.device)
    scores, theirs = torch.randn(batch, vocab, device=bench.device), NoRepeatNGramLogitsProcessor(3)
    runs = {"oslo_models": lambda: block_repeats_(scores, ids, 3), "transformers": lambda: theirs(ids, scores)}
    for run in runs.values():
        run()
    bench.ready()
    for peer, run in runs.items():
        with bench.attempt(peer):
            bench.row(peer, "call", bench.timer.seconds(run, graph=False) * 1e6, "us")
            bench.row(peer, "call, host", bench.timer.host(run) * 1e6, "us")


def optimizer(bench: Bench) -> None:
    """Clipping the gradients' norm, and a step of AdamW, of GPT-2 124M in float32."""
    from transformers import GPT2Config

    from oslo_models import GPT2LMHeadModel

    config = GPT2Config(**bench.pick({}, {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}))
    model = GPT2LMHeadModel.from_config_with_parallel(config, dtype=torch.float32, seed=0)
    params = list(model.parameters())
    for param in params:
        param.grad = torch.randn_like(param)
    ours, theirs = model.fused_adamw(), torch.optim.AdamW(params)
    clips = {
        "oslo_models": lambda: model.clip_grad_norm_(1e6),
        "torch": lambda: torch.nn.utils.clip_grad_norm_(params, 1e6),
    }
    bench.ready()
    for peer, stepper in (("oslo_models", ours), ("torch", theirs)):
        with bench.attempt(peer):
            stepper.step()
            bench.row(peer, "optimizer step", bench.timer.seconds(stepper.step, graph=False) * 1e6, "us")
            bench.row(peer, "clipping", bench.timer.seconds(clips[peer], graph=False) * 1e6, "us")
            bench.row(peer, "clipping, host", bench.timer.host(clips[peer], 20) * 1e6, "us")
