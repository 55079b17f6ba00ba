"""Sequence parallelism: between the sharded layers of a block, each tensor-parallel rank holds a part of the tokens.

Hidden states become `ShardedActivation` with a sharded token dimension. transformers' code sees whole shapes. Linear
layers with sharded outputs gather the tokens, and linear layers with sharded inputs return a part of their sum.
Norms compute the local tokens. Everything else follows the rules of `ShardedActivation`, or gathers.

A whole tensor has the same gradient on all ranks, and a part has its part of that gradient. Parameters that compute
parts have partial gradients, which are all-reduced.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to, gather_to, reduce_scatter_from
from oslo_models.distributed.collectives import has_dispatch_mode
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.layers.sharded_activation import ShardedActivation, ShardSpec
from oslo_models.layers.token_division import TOKENS, TokenDivision, hidden_states_of, with_hidden_states
from oslo_models.layers.token_region import TokenRegion, is_supported


class TokenParts(TokenDivision):
    """Divides hidden states over the ranks of the tp axis.

    Attributes:
        shape: rows and tokens of the divided hidden states of the block that is running. ``None`` outside of blocks,
            and in blocks with whole hidden states.
    """

    def __init__(self, tp: Axis) -> None:
        super().__init__(tp, "sequence_parallel=True")
        self.shape: tuple[int, ...] | None = None

    def watch(self, block: nn.Module) -> None:
        """Divide the hidden states at the entry of a block."""
        block.register_forward_pre_hook(self._enter, with_kwargs=True)
        block.register_forward_hook(self._leave, always_call=True)

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = self._divided(block, hidden_states_of(args, kwargs))
        if hidden is None:
            return None
        self.shape = tuple(hidden.full_shape[:2])
        return with_hidden_states(hidden, args, kwargs)

    def _leave(self, *_: Any) -> None:
        self._end()

    def _end(self) -> None:
        self.shape = None

    def _recompute(self) -> Callable[[], AbstractContextManager[None]]:
        return partial(self._running, self.shape)

    @contextmanager
    def _running(self, shape: tuple[int, ...] | None) -> Iterator[None]:
        before, self.shape = self.shape, shape
        try:
            yield
        finally:
            self.shape = before

    def _mark(self, local: Tensor, spec: ShardSpec, length: int) -> ShardedActivation:
        return ShardedActivation.from_local(local, self.axis, spec, length)

    def divide_sum(self, product: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return this rank's tokens of a sum over the ranks, or ``None`` if hidden states are whole.

        Args:
            product: the product of local features, ``[rows, tokens, out]`` or ``[rows * tokens, out]``.
            bias: the bias of the layer, ``[out]``, which is replicated.
        """
        if self.shape is None or product.shape[:-1] not in (self.shape, (self.shape[0] * self.shape[1],)):
            return None
        rows, length = self.shape
        product_rtf = product.view(rows, length, -1)
        local = reduce_scatter_from(self.axis, product_rtf, TOKENS, self._sizes(length))
        if bias is not None:
            local = local + copy_to(self.axis, bias).to(local.dtype)
        if product.dim() == 3:
            return self._mark(local, ShardSpec(TOKENS, length), length)
        return self._mark(local.flatten(0, 1), ShardSpec(0, length, rows), rows * length)


def require_whole(x: Any, layer: nn.Module) -> None:
    """Raise ``TypeError`` if a layer with sharded inputs got a part of the tokens.

    Its input has local features of all tokens. A part among its operands would mix tokens of different ranks.
    """
    if isinstance(x, ShardedActivation):
        raise TypeError(
            f"the input of a {type(layer).__name__} was computed from a part of the tokens and from local features: "
            "sequence_parallel=True does not support this layer"
        )


def gathered_inputs(layer: nn.Module, args: Any, kwargs: Any) -> Any:
    """Gather parts of tokens: a forward pre-hook of sharded layers that read whole tensors."""

    def whole(value: Any) -> Any:
        return value.full(type(layer).__name__) if isinstance(value, ShardedActivation) else value

    return tuple(map(whole, args)), {name: whole(value) for name, value in kwargs.items()}


# Readers of all tokens ------------------------------------------------------------------------------------------------


def whole_of(x: ShardedActivation) -> Tensor:
    """Gather the tokens for a layer with sharded outputs. Each rank's gradient is partial: it is reduce-scattered.

    All readers of the same tensor share one gather.
    """
    local = x.local()
    region: TokenRegion | None = getattr(x, "_oslo_region", None)
    if region is not None and region.version == local._version:
        return region.whole if x.spec.parts == 1 else region.whole.flatten(x.spec.dim, x.spec.dim + 1)
    known: tuple[Tensor, int, bool] | None = getattr(x, "_oslo_whole", None)
    if known is None or known[1:] != (local._version, torch.is_grad_enabled()):
        known = x._oslo_whole = (_gathered(x, local), local._version, torch.is_grad_enabled())  # type: ignore[attr-defined]
    return known[0]


def _gathered(x: ShardedActivation, local: Tensor) -> Tensor:
    own, dim, sizes = _apart(x, local)
    whole = gather_to(x.tp, own, dim, sizes)
    return whole if dim == x.spec.dim else whole.flatten(x.spec.dim, dim)


def _apart(x: ShardedActivation, local: Tensor) -> tuple[Tensor, int, list[int]]:
    """Return the local tensor with a dimension for the tokens alone, this dimension, and the sizes of all ranks."""
    dim, parts, sizes = x.spec.dim, x.spec.parts, x.spec.sizes(x.full_shape[x.spec.dim], x.tp.size)
    return (local, dim, sizes) if parts == 1 else (local.unflatten(dim, (parts, -1)), dim + 1, sizes)


def product_of_whole(layer: Any, x: ShardedActivation, bias: Tensor | None) -> Tensor:
    """Return the product of the gathered tokens with the weight of a layer with sharded outputs, ``[..., local_out]``.

    The backward pass gathers the tokens again, so that only the local tokens are saved. Layers that read the same
    tensor share both gathers. Source: Korthikanti et al., 2022, section 4.2.2.
    """
    local = x.local()
    region: TokenRegion | None = getattr(x, "_oslo_region", None)
    if region is None or region.version != local._version:
        if not _begins_region(layer, x, local):
            product: Tensor = layer.product(whole_of(x), layer.weight, bias)
            return product
        own, dim, sizes = _apart(x, _autocast(local))
        region = x._oslo_region = TokenRegion(own, x.tp, dim, sizes, local._version)  # type: ignore[attr-defined]
    is_known = is_supported(layer, region.whole)
    product = region.product(layer, bias) if is_known else layer.product(region.whole, layer.weight, bias)
    return product if x.spec.parts == 1 else product.flatten(x.spec.dim, x.spec.dim + 1)


def _begins_region(layer: Any, x: ShardedActivation, local: Tensor) -> bool:
    if not torch.is_grad_enabled() or not local.requires_grad:
        return False
    if has_dispatch_mode() and not local.is_meta:  # a plan on the meta device counts what a region saves
        return False
    return getattr(x, "_oslo_whole", None) is None and is_supported(layer, local)


def _autocast(x: Tensor) -> Tensor:
    """Cast hidden states as autocast does, before they are gathered and saved."""
    if x.is_meta or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


# Layers of single tokens ----------------------------------------------------------------------------------------------


class TokenwiseModule(nn.Module):
    """Mixin before the class of a replicated norm: computes the local tokens of a part.

    The gradients of the parameters are partial then. They are all-reduced.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, ShardedActivation) or args or kwargs or x.spec.dim == x.dim() - 1:
            return super().forward(x, *args, **kwargs)
        with without_override():
            own = {name: copy_to(x.tp, param) for name, param in self._parameters.items() if param is not None}
        with override_attributes(self, own):
            return x.with_local(super().forward(x.local()))
