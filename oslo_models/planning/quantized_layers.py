"""Stand-ins for linear layers with 4-bit weights on the meta device, as bitsandbytes computes them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Weights that share a scale."""


def product(x: Tensor, packed: Any, bias: Tensor | None = None) -> Tensor:
    """Return the product of ``F.linear`` with a weight of `quantize_frozen_layers`."""
    result: Tensor = _Product.apply(x, packed, bias, packed.out_features)
    return result


class _Product(torch.autograd.Function):
    """Product with a weight that is dequantised for each pass. Only the packed weight is kept for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.size = out_features
        return F.linear(x, x.new_empty(out_features, x.shape[-1]), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        in_features = ctx.saved_tensors[0].numel() * 2 // ctx.size
        return grad @ grad.new_empty(ctx.size, in_features), None, None, None


def quantize_frozen_layers(model: nn.Module) -> None:
    """Give the base layers of adapters 4-bit weights (nf4 with one scale for each block), in place."""
    for module in model.modules():
        base = getattr(module, "base_layer", None)
        if isinstance(base, nn.Linear):
            count = base.weight.numel()
            packed = torch.empty((count + 1) // 2, dtype=torch.uint8, device="meta")
            base.register_buffer("scales", torch.empty(-(-count // BLOCK), device="meta"))
            rows = base.weight.shape[0]
            base.weight = nn.Parameter(packed, requires_grad=False)
            base.weight.out_features = rows  # type: ignore[attr-defined]
