"""One linear layer in float8, eager and compiled, beside the same layer in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.rehearse.bench import Bench


def linear(bench: Bench, recipe: str) -> None:
    """Forward and backward pass of a layer as wide as an MLP of Llama-8B."""
    from oslo_models.distributed.mesh import Axis
    from oslo_models.fusion.float8 import Float8, Float8Linear

    tokens, width, inner = bench.pick((8192, 4096, 14336), (16, 32, 48))
    dtype = torch.bfloat16
    layers: dict[str, Any] = {"torch, bfloat16": nn.Linear(width, inner, bias=False, device=bench.device, dtype=dtype)}
    own = nn.Linear(width, inner, bias=False, device=bench.device, dtype=dtype)
    own.weight.data.copy_(layers["torch, bfloat16"].weight.data)
    own.__class__ = Float8Linear
    own.float8 = Float8(recipe == "rowwise", Axis.alone("tp"), False, False)
    layers["oslo_models"] = own
    if not bench.dry:
        layers["oslo_models compiled"] = torch.compile(own)
    x = torch.randn(tokens, width, device=bench.device, dtype=dtype, requires_grad=True)
    grad = torch.randn(tokens, inner, device=bench.device, dtype=dtype)
    steps: dict[str, Any] = {}
    for peer, layer in layers.items():
        with bench.attempt(peer):

            def step(layer: Any = layer) -> None:
                torch.autograd.grad(layer(x), (x, layer.weight if hasattr(layer, "weight") else own.weight), grad)

            step()
            steps[peer] = step
    _casts(bench, x.detach())
    bench.ready()
    for peer, step in steps.items():
        with bench.attempt(peer):
            seconds = bench.timer.seconds(step, graph=False)
            bench.row(peer, "forward and backward", seconds * 1e3, "ms")
            bench.row(
                peer,
                "share of the product's peak",
                6 * tokens * width * inner / seconds / bench.timer.ceilings().product,
                "",
            )


def _casts(bench: Bench, x: torch.Tensor) -> None:
    """Casts by one kernel equal torch's bit by bit. Triton's interpreter cannot show this: it rounds otherwise."""
    from oslo_kernels.float8 import E4M3, E5M2, cast, casts, largest, scale_of

    for dtype in (E4M3, E5M2):
        with bench.attempt("oslo_models", f"casts to {dtype}"):
            scale = scale_of(largest(x, None), dtype)
            expected = cast(x, scale, dtype).view(torch.uint8)
            rows, columns = (each.view(torch.uint8) for each in casts(x, scale, dtype, columns=True))
            wrong = int((rows != expected).sum() + (columns != expected.T).sum())
            bench.check(f"casts to {dtype}: wrong elements", wrong, 0)
