"""Kernels match plain torch: reference formulas, Triton's interpreter, compiled code, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_part
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from oslo_kernels import (
    cross_entropy,
    dropout,
    full_norm_rotary,
    gated,
    gelu,
    norm,
    normed_rotary,
    rotary,
    softmax,
    sums,
)
from oslo_kernels.build import cache_folder
from oslo_kernels.operation import operation

from support import ROOT, kernel_cases


def run(script: str, *arguments: str, **environment: str) -> str:
    """Run a script of tests/support as a process, because Triton enables its interpreter at import."""
    path = os.pathsep.join(map(str, (ROOT / "tests", ROOT / "kernels", ROOT)))
    variables = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", **environment}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests" / "support" / script), *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_kernels_match_torch_in_the_triton_interpreter(seed: int) -> None:
    run("kernel_cases.py", str(seed), TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")


def test_kernels_compile_ahead_of_time_without_spills() -> None:
    """For Ampere and Hopper: no stack, few registers, wide loads and stores. Builds are kept for other runs."""
    said = run("kernel_builds.py", TRITON_CACHE_DIR=str(cache_folder() / "triton"))
    assert said.count("stack 0") == len(said.splitlines()) > 40


@pytest.mark.zoo
@pytest.mark.parametrize("arch", ["100", "120"])
def test_kernels_compile_ahead_of_time_for_blackwell(arch: str) -> None:
    said = run("kernel_builds.py", arch, TRITON_CACHE_DIR=str(cache_folder() / "triton"))
    assert said.count("stack 0") == len(said.splitlines()) > 20


@pytest.mark.gpu
def test_kernels_match_torch_on_a_gpu(seed: int) -> None:
    torch.manual_seed(seed)
    lines = kernel_cases.check(partial(kernel_cases.copy_to, device="cuda"))
    assert not lines, "\n".join(lines)


def test_inputs_keep_their_strides_on_another_device() -> None:
    """``cuda()`` would make rows with gaps contiguous, and the kernels would not be tested on such rows."""
    gaps = 0
    for name, _, _, args in kernel_cases.cases(torch.float32, 1):
        for x in args:
            if isinstance(x, Tensor):
                found = kernel_cases.copy_to(x, "meta")
                assert found.is_meta and (found.shape, found.stride()) == (x.shape, x.stride()), name
                assert torch.equal(kernel_cases.copy_to(x, "cpu"), x)
                gaps += x.to("meta").stride() != x.stride()
    assert gaps > 5


def double(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def formulas() -> dict[str, tuple[Any, Any, tuple[Any, ...]]]:
    """Return each operation, an equivalent formula in torch, and arguments."""
    x, y, weight, bias = double(2, 3, 6), double(2, 3, 6), double(6), double(6)
    scores, mask = double(2, 3, 4, 5), double(1, 3, 4, 5)
    cos, sin = torch.randn(2, 1, 4, 6, dtype=torch.float64)
    causal = torch.full((4, 5), torch.finfo(torch.float32).min, dtype=torch.float64).triu(2)

    def rms(x: Tensor, _: Any, weight: Tensor, *__: Any) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight

    def layer(x: Tensor, y: Tensor, weight: Tensor, bias: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return F.layer_norm(x + y, (6,), weight, bias, 1e-5), x + y

    def gemma(x: Tensor, y: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return rms(x + y, None, weight + 1), x + y

    def heads(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, *_: Any) -> Any:
        return apply_rotary_pos_emb(rms(query, None, q + 1), rms(key, None, k + 1), cos, sin)

    q_and_k = (double(2, 3, 4, 6), double(2, 1, 4, 6))
    return {
        "gelu": (gelu.bias_gelu, lambda x, b, a: F.gelu(x + b, approximate=a), (x, bias, "none")),
        "gelu by tanh": (gelu.bias_gelu, lambda x, b, a: F.gelu(x + b, approximate=a), (x, bias, "tanh")),
        "gelu without bias": (gelu.bias_gelu, lambda x, b, a: F.gelu(x), (x, None, "none")),
        "swiglu": (gated.gated, lambda g, u, kind: F.silu(g) * u, (x, y, "silu")),
        "geglu": (gated.gated, lambda g, u, kind: F.gelu(g) * u, (x, y, "gelu")),
        "geglu by tanh": (gated.gated, lambda g, u, kind: F.gelu(g, approximate="tanh") * u, (x, y, "gelu_tanh")),
        "packed swiglu": (gated.gated_packed, lambda x, kind: F.silu(x[..., :3]) * x[..., 3:], (x, "silu")),
        "layer norm": (norm.add_norm, layer, (x, y, weight, bias, 1e-5, True)),
        "norm and sum": (norm.norm_add, lambda x, y, w, *_: y + rms(x, None, w + 1), (x, y, weight, 1e-5, 1.0, True)),
        "sum of three": (sums.sum_of_three, lambda x, y, z: x + y + z, (x, y, double(2, 3, 6))),
        "gemma's norm": (norm.add_norm, gemma, (x, y, weight, None, 1e-5, False, 1.0, True)),
        "rms norm": (norm.add_norm, rms, (x, None, weight, None, 1e-5, False)),
        "softmax": (softmax.masked_softmax, lambda s, m, k: (s * k + m).softmax(-1), (scores, mask, 0.3)),
        "causal softmax": (
            softmax.masked_softmax,
            lambda s, m, k, c: (s * k + causal).softmax(-1),
            (scores, None, 0.3, True),
        ),
        "rotary": (rotary.rotary, apply_rotary_pos_emb, (*q_and_k, cos, sin)),
        "norm of heads and rotary": (
            normed_rotary.normed_rotary,
            heads,
            (*q_and_k, cos, sin, double(6), double(6), 1e-5, 1.0, True),
        ),
        "partial rotary": (rotary.rotary, rotate_part, (double(2, 3, 4, 9), double(2, 1, 4, 9), cos, sin)),
        "dropout": (
            dropout.bias_dropout_residual,
            lambda x, b, r, p, s: r + (x + b) * dropout.keep_mask(x, p, s) / (1 - p),
            (x, bias, y, 0.25, 5),
        ),
    }


@pytest.mark.parametrize("name", formulas())
def test_reference_formulas_and_gradients_match_torch(name: str, seed: int) -> None:
    """Check values and gradients in float64, and the registration of operations for `torch.compile`."""
    torch.manual_seed(seed)
    operation, plain, args = formulas()[name]
    for by in (operation, operation.op):  # without torch's dispatcher, and through it
        compare(by, plain, args)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operation.op, args, test_utils=checks)


def test_formulas_of_norms_over_all_heads(seed: int) -> None:
    """Check values and gradients; the caller computes the row sums."""
    torch.manual_seed(seed)
    q, k, of_query, of_key = double(2, 3, 4, 6), double(2, 1, 4, 6), double(2, 3, 4, 6), double(2, 1, 4, 6)
    weights, (cos, sin) = (double(18), double(6)), torch.randn(2, 1, 4, 6, dtype=torch.float64)

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        h = x.transpose(1, 2).flatten(2)
        h = h * (h.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (weight + 1)
        return h.view(x.transpose(1, 2).shape).transpose(1, 2)

    expected = apply_rotary_pos_emb(normed(q, weights[0]), normed(k, weights[1]), cos, sin)
    expected += torch.autograd.grad(expected, (q, k, *weights), (of_query, of_key))
    numbers, of = (18, 6, 1e-5, 1.0), full_norm_rotary
    checks = ("test_schema", "test_faketensor")
    with torch.no_grad():
        given = (q, k, cos, sin, *weights, of.row_products(q, q, k, k))
        found = of.full_norm_rotary(*given, *numbers)
        given = (*given, of.row_products(of_query, found[0], of_key, found[1]))
        found += of.full_norm_rotary_backward(of_query, of_key, *given, *numbers)
        torch.library.opcheck(of.row_products.op, (q, q, k, k), test_utils=checks)
        torch.library.opcheck(of.full_norm_rotary.op, (*given[:7], *numbers, True), test_utils=checks)
        torch.library.opcheck(of.full_norm_rotary_backward.op, (of_query, of_key, *given, *numbers), test_utils=checks)
    for own, exact in zip(found, expected, strict=True):
        assert (own - exact).abs().max() < 1e-10


def compare(operation: Any, plain: Any, args: tuple[Any, ...]) -> None:
    found, expected = operation(*args), plain(*args)
    found, expected = ([x] if isinstance(x, Tensor) else list(x) for x in (found, expected))
    found = found[: len(expected)]
    tensors = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
    seeds = [torch.randn_like(x) for x in expected]
    for own, exact in zip(found, expected, strict=True):
        assert (own - exact).abs().max() < 1e-10
    own_grads = torch.autograd.grad(found, tensors, seeds)
    for own, exact in zip(own_grads, torch.autograd.grad(expected, tensors, seeds), strict=True):
        assert (own - exact).abs().max() < 1e-10


def test_backward_passes_are_not_differentiated_silently() -> None:
    """A second derivative would miss the paths through saved tensors."""
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(gated.gated(x, x.detach()).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="gated_backward"):
        first.sum().backward()


def test_operations_reach_their_kernel_without_the_dispatcher() -> None:
    """Fake tensors, dispatch modes and `torch.compile` still go through the dispatcher."""
    seen: list[str] = []

    @operation("oslo::test_twice")
    def twice(x: Tensor) -> Tensor:
        seen.append("kernel")
        return 2 * x

    twice.register_fake(torch.empty_like)
    twice.register_autograd(lambda ctx, grad: 2 * grad, setup_context=lambda ctx, inputs, output: None)
    x = torch.ones(3, requires_grad=True)
    with mock.patch.object(twice, "op", side_effect=twice.op) as op:
        for given in (x, x.detach()):
            assert twice(given).tolist() == [2, 2, 2]
        twice(x).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2, 2, 2] and op.call_count == 0
        with FakeTensorMode() as mode:
            twice(mode.from_tensor(x))
        assert op.call_count == 1
    assert len(seen) == 3


def test_cross_entropy_operations_match_torch(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "PART", 100)  # few rows at once
    torch.manual_seed(seed)
    rules = (
        cross_entropy.Rule(),
        cross_entropy.Rule(start=3, hit=0.9, rest=0.1 / 7, scale=0.5, ignore_index=4, factor=1 / 18),
        cross_entropy.Rule(scale=0.3, cap=2.0, factor=0.4),
        cross_entropy.Rule(start=3, hit=0.9, rest=0.1 / 3001, ignore_index=4, factor=1 / 18),  # on a CPU in C++
    )
    for rule in rules:
        width = round((1 - rule.hit) / rule.rest) if rule.rest else 7
        products = (3 * torch.randn(20, width, dtype=torch.float64)).requires_grad_()
        target = torch.randint(width, (20,)) + rule.start
        target[:2] = rule.ignore_index
        logits = products * rule.scale
        logits = rule.cap * logits.tanh() if rule.cap else logits
        given = (target - rule.start).where(target != rule.ignore_index, -100)
        losses = F.cross_entropy(logits, given, reduction="none", label_smoothing=1 - rule.hit)
        (grad,) = torch.autograd.grad(losses.sum() * rule.factor, products)
        made = products.detach().clone()
        statistics = cross_entropy.row_statistics(made, target, rule)
        assert torch.equal(made, products)
        found = cross_entropy.replace_by_gradient_(made, statistics, target, rule)
        assert (found - losses).abs().max() < 1e-12 and (made - grad).abs().max() < 1e-12
        assert (rule.losses(statistics, target) - losses).abs().max() < 1e-12


def test_fully_masked_softmax_rows_match_transformers() -> None:
    scores, hidden = torch.randn(1, 1, 2, 4), torch.full((1, 1, 1, 4), torch.finfo(torch.float32).min)
    assert torch.equal(softmax.masked_softmax(scores, hidden), torch.full((1, 1, 2, 4), 0.25))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_matches_llama(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    module = LlamaRMSNorm(40, 1e-5).to(dtype)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(3, 40).to(dtype)
    found = norm.add_norm(x, None, module.weight, None, 1e-5, False)[0]
    assert torch.allclose(found, module(x), rtol=2 * torch.finfo(dtype).eps)
