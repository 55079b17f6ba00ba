"""Backward pass of column-parallel layers on GPUs. It overlaps the input gradient's all-reduce with weight gradients.

Layers that read the same tensor (query, key and value; gate and up) share one all-reduce. The first forward pass
records these layers. Source: Megatron-LM, ``LinearWithGradAccumulationAndAsyncCommunication``, which overlaps each
layer separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_kernels.linear import plain_conv1d, untimed_conv1d, untimed_linear
from oslo_models.distributed.collectives import has_dispatch_mode, start_all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.deferred_gradients import defers_weight_gradients

PRODUCTS = {untimed_linear: False, untimed_conv1d: True}
"""Products with overlap support, and whether their weight is ``[in, out]``."""


class Siblings:
    """Layers that read one tensor. A copied layer starts with an empty record."""

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[nn.Module]] = {}

    def __reduce__(self) -> Any:
        return Siblings, ()

    def add(self, layer: nn.Module) -> None:
        """Record that this layer reads the tensor."""
        self._known[id(layer)] = weakref.ref(layer)

    def layers(self) -> list[nn.Module]:
        """Return the recorded layers."""
        return [layer for reference in self._known.values() if (layer := reference()) is not None]


class Region:
    """Column-parallel layers that read one tensor, with a joint backward pass.

    Attributes:
        copy: alias of the tensor with an all-reduced gradient.
        weights: for each layer (by ``id``), its index and an alias of its weight. The region computes the gradients of
            the aliases.
        products: for each weight, the output gradient of its layer, the input, and whether the weight is
            ``[in, out]``.
    """

    def __init__(self, opener: Any, x: Tensor, axis: Axis) -> None:
        self.opener, self.axis, self.version = opener, axis, x._version
        layers = [layer for layer in _siblings(opener).layers() if _is_supported(layer, x)]
        self.products: list[tuple[Tensor, Tensor, bool] | None] = [None] * len(layers)
        self.copy, *aliases = _Enter.apply(x, axis, self.products, *(layer.weight for layer in layers))
        self.weights = {
            id(layer): (index, alias) for index, (layer, alias) in enumerate(zip(layers, aliases, strict=True))
        }

    def product(self, layer: Any, bias: Tensor | None) -> Tensor:
        """Return the output of a layer with this bias."""
        index, alias = self.weights.get(id(layer), (0, None))
        weight = layer.weight
        if alias is None or alias.data_ptr() != weight.data_ptr() or alias._version != weight._version:
            _siblings(self.opener).add(layer)
            return layer.product(self.copy, weight, bias)
        return _Product.apply(self.copy, alias, bias, self.products, index, PRODUCTS[layer.product])


def _siblings(layer: Any) -> Siblings:
    found = vars(layer).get("_siblings")
    if found is None:
        found = layer._siblings = Siblings()
        found.add(layer)
    return found


def overlaps(axis: Axis, x: Tensor) -> bool:
    """Return whether collectives of this tensor overlap with computation: on GPUs, between processes."""
    return x.is_cuda and axis.threads is None


def overlapped_product(layer: Any, x: Tensor, bias: Tensor | None) -> Tensor | None:
    """Return the output of a column-parallel layer with this bias, or ``None`` if overlap is not possible."""
    axis: Axis = layer.tp
    if axis.size == 1 or torch.compiler.is_compiling() or not overlaps(axis, x) or not torch.is_grad_enabled():
        return None
    if not x.requires_grad or x.is_leaf or has_dispatch_mode() or not _is_supported(layer, x):
        return None
    if defers_weight_gradients():  # no weight gradient is left to overlap with
        return None
    region: Region | None = getattr(x, "_oslo_region", None)
    if region is None or region.axis is not axis or region.version != x._version:
        if getattr(x, "_oslo_copy", None) is not None:
            return None  # other layers share an all-reduce already
        region = x._oslo_region = Region(layer, x, axis)  # type: ignore[attr-defined]
        x._oslo_copy = (region.copy, axis, x._version)  # type: ignore[attr-defined]
    return region.product(layer, bias)


def _is_supported(layer: Any, x: Tensor) -> bool:
    weight = layer.weight
    plain = type(weight) is nn.Parameter or bool(getattr(type(weight), "has_plain_storage", False))
    right = plain and weight.requires_grad and weight.dtype == x.dtype and weight.dim() == 2 and weight.numel() > 0
    return right and layer.product in PRODUCTS and not torch.is_autocast_enabled(x.device.type)


class _Enter(torch.autograd.Function):
    """Return the input, as `copy_to` does, and aliases of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, products: list[Any], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.products = axis, products
        ctx.set_materialize_grads(False)
        return x.detach(), *(weight.detach() for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        products, pending = list(ctx.products), None
        ctx.products[:] = [None] * len(products)
        if grad is not None:
            # The autograd engine may pass the same gradient to other nodes, so all-reduce a clone.
            pending = start_all_reduce(ctx.axis, grad.clone(memory_format=torch.contiguous_format))
        grads = [None if product is None else _weight_gradient(*product) for product in products]
        return None if pending is None else pending.wait(), None, None, *grads


class _Product(torch.autograd.Function):
    """Product of a layer. The backward pass of `_Enter` computes the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: list[Any], index: int, transposed: bool
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.index, ctx.transposed, ctx.has_bias = products, index, transposed, bias is not None
        return (plain_conv1d if transposed else F.linear)(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        ctx.products[ctx.index] = (grad, x, ctx.transposed)
        bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return grad @ (weight.T if ctx.transposed else weight), None, bias, None, None, None


def _weight_gradient(grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
    rows: Sequence[Tensor] = (x.flatten(0, -2), grad.flatten(0, -2))
    return rows[0].T @ rows[1] if transposed else rows[1].T @ rows[0]
