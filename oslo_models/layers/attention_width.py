"""Attention modules that reshape their output to the full hidden size, although a rank has only some of the heads."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class LocalWidthReshape(TorchFunctionMode):
    """While active, reshaping to the full width reshapes to the local width where the full one does not fit.

    Args:
        full: the width of all heads.
        local: the width of this rank's heads.
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
    """Mixed in before an attention class: runs its forward under `LocalWidthReshape`.

    Attributes:
        widths: the full and the local width.
    """

    widths: tuple[int, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with LocalWidthReshape(*self.widths):
            return super().forward(*args, **kwargs)
