"""Attention that gives what its heads made the width of what it was given, which is that of all heads."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class OwnWidth(TorchFunctionMode):
    """While active, a shape that ends in the width of all heads, and that a tensor cannot have, ends in this rank's.

    Args:
        whole: the width of all heads.
        own: the width of the heads that this rank has.
    """

    def __init__(self, whole: int, own: int) -> None:
        super().__init__()
        self._whole, self._own = whole, own

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.view, Tensor.reshape) and args[-1] == self._whole:
            x, *sizes = args
            own = (*sizes[:-1], self._own)
            if prod(sizes) != x.numel() == prod(own):
                return func(x, *own)
        return func(*args, **(kwargs or {}))


class LocalWidthModule(nn.Module):
    """In front of the class of an attention: runs its forward under `OwnWidth`."""

    widths: tuple[int, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with OwnWidth(*self.widths):
            return super().forward(*args, **kwargs)
