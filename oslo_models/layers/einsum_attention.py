"""Attention with a head dimension in its weight parameters. The forward applies them with ``einsum``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import ShardedRngStream


class HeadWeight(Tensor):
    """Local heads of a weight ``[..., heads, width]``.

    A product that creates the head dimension enters a sharded region. A product that sums over the heads leaves it.
    """

    tp: Axis
    stream: ShardedRngStream | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.einsum and len(args) == 3 and isinstance(args[2], cls):
            return args[2]._product(*args[:2])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _product(self, equation: str, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            weight = self.as_subclass(Tensor)
        inputs, _, result = equation.partition("->")
        x_dims, weight_dims = inputs.split(",")
        heads = weight_dims[-2]
        if heads not in x_dims:
            if self.stream is not None:
                self.stream.enter()
            x = copy_to(self.tp, x)
        if heads in result:
            return torch.einsum(equation, x, weight)
        if self.stream is not None:
            self.stream.leave()
        return reduce_from(self.tp, torch.einsum(equation, x, weight))


class EinsumHeadsModule(nn.Module):
    """Mixin before an attention class. The forward reads three-dimensional parameters as `HeadWeight`."""

    tp: Axis
    stream: ShardedRngStream | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        attributes = vars(self)
        for name, param in self._parameters.items():
            if param is not None and param.dim() == 3:
                attributes[name] = weight = param.as_subclass(HeadWeight)  # hides the parameter of this name
                weight.tp, weight.stream = self.tp, self.stream if self.training else None
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self._parameters:
                attributes.pop(name, None)
