"""Constructs models on the meta device without initialisation, since meta tensors have no values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import init
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors

_INITIALIZERS = {init.normal_, init.uniform_, init.kaiming_uniform_, init.constant_, Tensor.normal_, Tensor.uniform_}


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function unless it would initialise a meta tensor."""
    if func in _INITIALIZERS:
        tensor = args[0] if args else kwargs["tensor"]  # torch's init functions pass it by name
        if tensor.is_meta:
            return tensor
    return func(*args, **kwargs)


class uninitialized_on_meta(TorchFunctionMode):  # noqa: N801  reads as the context manager that it is
    """Context in which initialisers skip tensors on the meta device.

    torch would run its Python reference implementations, which take half of the construction time on the meta device.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return _call(func, args, kwargs or {})


class meta_device(DeviceContext):  # noqa: N801
    """``torch.device("meta")`` without initialisation, to construct a model.

    This is one mode rather than two, since every torch function call passes through each active mode.
    """

    def __init__(self) -> None:
        super().__init__("meta")
        self._changed = _INITIALIZERS | _device_constructors()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in self._changed:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func in _INITIALIZERS:
            return _call(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


def allocate(model: nn.Module, device: torch.device) -> None:
    """Do ``model.to_empty(device=device)`` in a tenth of the time: ``empty_like`` of meta tensors runs in Python."""

    def empty(x: Tensor) -> Tensor:
        if x.is_contiguous():
            return torch.empty(x.shape, dtype=x.dtype, device=device)
        return torch.empty_like(x, device=device)

    model._apply(empty)
