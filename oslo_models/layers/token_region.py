"""Products of gathered tokens: column-parallel layers that read the same part of the tokens share its gathers.

The forward pass gathers the tokens and saves only the local ones. The backward pass gathers them again for the weight
gradients, and reduce-scatters their gradient. Source: Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from oslo_kernels.linear import untimed_conv1d, untimed_linear
from oslo_models.distributed.autograd_collectives import gather_to, reduce_scatter_from
from oslo_models.distributed.collectives import all_gather
from oslo_models.distributed.mesh import Axis

PRODUCTS: dict[Callable[..., Tensor], bool] = {untimed_linear: False, untimed_conv1d: True}
"""Products of `TokenRegion`, and whether their weight is ``[in, out]``."""


class WeightSource(NamedTuple):
    """Source of a local weight that is a copy. The backward pass makes the copy again, so that it is not saved.

    Attributes:
        whole: the whole weight.
        shard: returns the local weight.
    """

    whole: Tensor
    shard: Callable[[Tensor], Tensor]

    def attach(self, local: Tensor) -> None:
        """Note the source of a local weight."""
        local._oslo_source = self  # type: ignore[attr-defined]


class TokenRegion:
    """Tokens of all ranks for layers with sharded outputs.

    Args:
        x: this rank's tokens.
        axis: axis of the ranks.
        dim: dimension of the tokens.
        sizes: number of tokens of each rank.

    Attributes:
        whole: the gathered tokens. Each rank's gradient is partial.
        version: version of the tensor that the layers read.
    """

    def __init__(self, x: Tensor, axis: Axis, dim: int, sizes: Sequence[int], version: int) -> None:
        self.version = version
        self._state = _State(axis, dim, sizes)
        self.whole: Tensor = _Gather.apply(x, self._state)

    def product(self, layer: Any, bias: Tensor | None) -> Tensor:
        """Return the product with the weight of a layer that `is_supported`."""
        due: list[Tensor] = []
        transposed = PRODUCTS[layer.product]
        source: WeightSource | None = getattr(layer.weight, "_oslo_source", None)
        weight = _Weight.apply(layer.weight, transposed, due, self._state, self.whole.grad_fn)
        return _Product.apply(self.whole, weight, bias, transposed, due, layer.product, source)


def is_supported(layer: Any, x: Tensor) -> bool:
    """Return whether `TokenRegion.product` can compute the product of a layer with gathered ``x``."""
    weight = layer.weight
    is_plain = type(weight) in (Tensor, nn.Parameter) or bool(getattr(type(weight), "has_plain_storage", False))
    if not is_plain or not weight.requires_grad or weight.dim() != 2 or layer.product not in PRODUCTS:
        return False
    return weight.dtype == x.dtype or torch.is_autocast_enabled(x.device.type)


class _State:
    """State of a `TokenRegion` in the backward pass.

    Attributes:
        again: the tokens of all ranks, gathered again for the weight gradients.
    """

    def __init__(self, axis: Axis, dim: int, sizes: Sequence[int]) -> None:
        self.axis, self.dim, self.sizes = axis, dim, sizes
        self.again: Tensor | None = None


class _Gather(torch.autograd.Function):
    """Gather the tokens, as `gather_to` does. `_Weight` reads the saved local tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: _State) -> Tensor:
        ctx.state = state
        ctx.save_for_backward(x)
        ctx.set_materialize_grads(False)
        return all_gather(state.axis, x, state.dim, state.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None]:
        state: _State = ctx.state
        state.again = None  # the engine has run the weights, which were created later
        return (None if grad is None else reduce_scatter_from(state.axis, grad, state.dim, state.sizes)), None


class _Weight(torch.autograd.Function):
    """Return an alias of a weight. The backward pass computes the weight gradient once `_Product` has left its factor.

    The engine runs ready nodes in the reverse order of their creation. So all weights come before `_Gather`, which
    still has its saved tokens.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, transposed: bool, due: list[Tensor], state: _State, gather: Any) -> Tensor:
        ctx.transposed, ctx.due, ctx.state, ctx.gather = transposed, due, state, gather
        ctx.set_materialize_grads(False)
        return weight.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        """Compute the weight gradient. ``grad`` is that of other uses of the weight, in second derivatives."""
        if ctx.due:
            state: _State = ctx.state
            if state.again is None:
                (own,) = ctx.gather.saved_tensors
                state.again = gather_to(state.axis, own, state.dim, state.sizes)
            of_product = _weight_gradient(ctx.due.pop(), state.again, ctx.transposed)
            grad = of_product if grad is None else grad + of_product
        return grad, None, None, None, None


class _Product(torch.autograd.Function):
    """Product of a layer. The gathered tokens are not saved."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        due: list[Tensor],
        product: Callable[..., Tensor],
        source: WeightSource | None,
    ) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(weight if source is None else source.whole)
        ctx.shard = None if source is None else source.shard
        ctx.transposed, ctx.due, ctx.has_bias = transposed, due, bias is not None
        out = product(x, weight, bias)
        return torch.ops.aten._unsafe_view(out, out.shape) if out._is_view() else out  # others may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None, None, None
        (weight,) = ctx.saved_tensors
        if ctx.shard is not None:
            weight = ctx.shard(weight)
        ctx.due[:] = [grad]
        of_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        weight = weight.to(grad.dtype)  # autocast has cast it
        of_x = untimed_linear(grad, weight if ctx.transposed else weight.t())
        return of_x, None, of_bias, None, None, None, None


def _weight_gradient(grad: Tensor, x: Tensor, transposed: bool) -> Tensor:
    x_ni, grad_no = x.flatten(0, -2).to(grad.dtype), grad.flatten(0, -2)
    return untimed_linear(x_ni.t(), grad_no.t()) if transposed else untimed_linear(grad_no.t(), x_ni.t())
