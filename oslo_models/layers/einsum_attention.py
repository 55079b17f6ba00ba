"""Attention whose weights are bare tensors with a dimension of heads, which its forward applies by ``einsum``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.rng import ShardedRngStream


class HeadWeight(Tensor):
    """A rank's heads of a weight ``[..., heads, width]``.

    A product that makes heads of its input begins a divided region, one that sums over heads ends it.
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
        read, _, made = equation.partition("->")
        of_x, of_weight = read.split(",")
        heads = of_weight[-2]
        if heads not in of_x:
            if self.stream is not None:
                self.stream.enter()
            x = copy_to(self.tp, x)
        if heads in made:
            return torch.einsum(equation, x, weight)
        if self.stream is not None:
            self.stream.leave()
        return reduce_from(self.tp, torch.einsum(equation, x, weight))


class EinsumHeadsModule(nn.Module):
    """In front of the class of an attention: lets it find `HeadWeight` for its parameters of three dimensions."""

    tp: Axis
    stream: ShardedRngStream | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self)
        for name, param in self._parameters.items():
            if param is not None and param.dim() == 3:
                own[name] = weight = param.as_subclass(HeadWeight)  # found before the parameter
                weight.tp, weight.stream = self.tp, self.stream if self.training else None
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name in self._parameters:
                own.pop(name, None)
