"""Joint backward pass of column-parallel layers that read the same tensor: query, key and value; gate and up.

* On GPUs, it overlaps the all-reduce of the input gradient with the weight gradients.
* With sequence parallelism, it gathers the input again, and reduce-scatters the input gradient.

The layers share these collectives. The first forward pass records the layers. Source: Megatron-LM,
``LinearWithGradAccumulationAndAsyncCommunication``, which does so for each layer separately.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from oslo_kernels.linear import many_rows_conv1d, many_rows_linear
from oslo_models.distributed.autograd_collectives import gather_to, reduce_scatter_from
from oslo_models.distributed.collectives import all_gather, has_dispatch_mode, start_all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.deferred_gradients import defers_weight_gradients

PRODUCTS = {many_rows_linear: False, many_rows_conv1d: True}
"""Products with overlap support, and whether their weight is ``[in, out]``."""


_Due = tuple[Tensor, bool]
"""Output gradient of a product, and whether the weight is ``[in, out]``."""


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

    Args:
        opener: the first layer.
        x: the tensor, or this rank's part of it.
        axis: axis of the ranks.
        parts: dimension and sizes of the parts, if each rank holds a part of the tensor.

    Attributes:
        copy: alias of the tensor, or the gathered tensor. Its gradient is summed over the ranks.
        weights: for each layer (by ``id``), its index and an alias of its weight. The region computes the gradients of
            the aliases.
        products: for each weight, the output gradient of its layer, and whether the weight is ``[in, out]``.
    """

    def __init__(self, opener: Any, x: Tensor, axis: Axis, parts: tuple[int, Sequence[int]] | None = None) -> None:
        self.opener, self.axis, self.version = opener, axis, x._version
        layers = [layer for layer in _siblings(opener).layers() if has_region_support(layer, x, parts is not None)]
        self.products: list[_Due | None] = [None] * len(layers)
        weights = [layer.weight for layer in layers]
        if parts is None:
            self.copy, *aliases = _Enter.apply(x, axis, self.products, *weights)
        else:
            self.copy, *aliases = _EnterParts.apply(x, axis, parts, self.products, *weights)
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
        return _Product.apply(self.copy, alias, bias, self.products, index, layer.product)


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
    if not x.requires_grad or x.is_leaf or has_dispatch_mode() or not has_region_support(layer, x):
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


def has_region_support(layer: Any, x: Tensor, in_autocast: bool = False) -> bool:
    """Return whether a `Region` can compute the weight gradient of a layer that reads ``x``.

    Args:
        in_autocast: whether the region supports autocast.
    """
    weight, casts = layer.weight, torch.is_autocast_enabled(x.device.type)
    plain = type(weight) is nn.Parameter or bool(getattr(type(weight), "has_plain_storage", False))
    right = plain and weight.requires_grad and weight.dim() == 2 and weight.numel() > 0 and layer.product in PRODUCTS
    return right and (in_autocast if casts else weight.dtype == x.dtype)


class _Enter(torch.autograd.Function):
    """Return the input, as `copy_to` does, and aliases of the weights."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, products: list[Any], *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.products = axis, products
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return x.detach(), *(weight.detach() for weight in weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor | None, *of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        products, pending = _taken(ctx.products), None
        if grad is not None:
            # The autograd engine may pass the same gradient to other nodes, so all-reduce a clone.
            pending = start_all_reduce(ctx.axis, grad.clone(memory_format=torch.contiguous_format))
        grads = _weight_gradients(products, *ctx.saved_tensors)
        return None if pending is None else pending.wait(), None, None, *grads


class _EnterParts(torch.autograd.Function):
    """Return the gathered input, as `gather_to` does, and aliases of the weights. Saves only the local part."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: Axis, parts: tuple[int, Sequence[int]], products: list[Any], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.axis, ctx.parts, ctx.products = axis, parts, products
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return all_gather(axis, x, *parts), *(weight.detach() for weight in weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *of_weights: Tensor | None) -> tuple[Tensor | None, ...]:
        products = _taken(ctx.products)
        of_part = None if grad is None else reduce_scatter_from(ctx.axis, grad, *ctx.parts)
        del grad  # before the input is gathered again
        if all(product is None for product in products):
            return of_part, None, None, None, *products  # type: ignore[return-value]
        (own,) = ctx.saved_tensors
        grads = _weight_gradients(products, gather_to(ctx.axis, own, *ctx.parts))
        return of_part, None, None, None, *grads


class _Product(torch.autograd.Function):
    """Product of a layer. The backward pass of `_Enter` or `_EnterParts` computes the weight gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: list[Any], index: int, product: Any
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight)
        ctx.products, ctx.index, ctx.transposed, ctx.has_bias = products, index, PRODUCTS[product], bias is not None
        out: Tensor = product(x, weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out  # others may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, None
        (weight,) = ctx.saved_tensors
        ctx.products[ctx.index] = (grad, ctx.transposed)
        bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        weight = weight.to(grad.dtype)  # autocast has cast it
        return many_rows_linear(grad, weight if ctx.transposed else weight.t()), None, bias, None, None, None


def _taken(products: list[_Due | None]) -> list[_Due | None]:
    """Return the products and clear the list, for another backward pass."""
    taken = list(products)
    products[:] = [None] * len(products)
    return taken


def _weight_gradients(products: list[_Due | None], x: Tensor) -> list[Tensor | None]:
    return [None if product is None else _weight_gradient(*product, x) for product in products]


def _weight_gradient(grad: Tensor, transposed: bool, x: Tensor) -> Tensor:
    x_ni, grad_no = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
    if transposed:
        return many_rows_linear(x_ni.t(), grad_no.t())
    return many_rows_linear(grad_no.t(), x_ni.t())
