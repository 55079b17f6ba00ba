"""Support for attention modules that reshape the output of the local heads to the full hidden size."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LocalWidthReshape(TorchFunctionMode):
    """Mode that replaces the full width in reshapes by the local width if the full width does not fit.

    Args:
        full: width of all heads.
        local: width of the local heads.
    """

    def __init__(self, full: int, local: int) -> None:
        super().__init__()
        self._full, self._local = full, local

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.view, Tensor.reshape) and args[-1] == self._full:
            x, *sizes = args
            local_sizes = (*sizes[:-1], self._local)
            if prod(sizes) != x.numel() == prod(local_sizes):
                return func(x, *local_sizes)
        return func(*args, **(kwargs or {}))


class LocalWidthModule(nn.Module):
    """Mixin before an attention class. Runs its forward under `LocalWidthReshape`.

    Attributes:
        widths: the full and the local width.
    """

    widths: tuple[int, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with LocalWidthReshape(*self.widths):
            return super().forward(*args, **kwargs)
