"""Keeps float64 computations of transformers in float64, so that parallel results can be compared exactly.

transformers casts to float32 inside losses, norms and softmax for every model dtype. The cast hides differences below
1e-7. Used around the reference and, inside the workers, around the parallel run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CASTS = {
    Tensor.to,
    Tensor.type,
    Tensor.type_as,
    F.softmax,
    F.log_softmax,
    F.cross_entropy,  # DETR's has weights
    torch.zeros_like,  # Inkling 2 sums the outputs of experts into it
    Tensor.new_zeros,  # Kimi K2.5 sums the frames of a video into it
    *(
        getattr(owner, name)
        for owner in (torch, Tensor)
        for name in ("softmax", "log_softmax", "sum", "mean", "cumsum")
    ),
}
_SMALLEST = torch.finfo(torch.float64).min
_PRODUCTS = {torch.matmul, torch.bmm, torch.einsum, Tensor.matmul, Tensor.bmm, Tensor.__matmul__, Tensor.__rmatmul__}
_PRODUCTS |= {F.grid_sample, torch.grid_sampler}  # GLM-4V's positions, at coordinates in float32
_OTHERS = {F.batch_norm, Tensor.float, torch.full, torch.zeros, Tensor.__mul__, Tensor.mul, Tensor.scatter_reduce}
_OTHERS |= {torch._grouped_mm}
_CHANGED = frozenset(_CASTS | _PRODUCTS | _OTHERS)
"""All changed functions: every other function, and thus nearly every call, takes the fast path."""


class lifted_casts(TorchFunctionMode):  # noqa: N801  reads as the context manager that it is
    """Keeps float64 tensors in float64: casts to float32 do nothing, and ``dtype=torch.float32`` is ignored.

    A product of a float64 and a float32 tensor, an error otherwise, is made in float64: it meets rotary frequencies
    that a ``model.double()`` has made float64.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _CHANGED:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if func is Tensor.float:
            if _is_double(args[0]):
                return args[0]
        elif func in _CASTS:
            if _is_double(args[0]):
                args, kwargs = (args[0], *map(_widen, args[1:])), {key: _widen(value) for key, value in kwargs.items()}
        elif func is torch.zeros and "size" in kwargs:  # ERNIE 4.5 VL's logits of routers, filled by kind of token
            kwargs = {key: _widen(value) for key, value in kwargs.items()}
        elif func is torch.full and "dtype" not in kwargs and _overflows(*args[1:2], **kwargs):
            kwargs = {**kwargs, "dtype": torch.float64}  # XGLM's smallest number
        elif func in (Tensor.__mul__, Tensor.mul) and isinstance(args[1], float) and args[1] == _SMALLEST:
            args = (_widen(args[0]), args[1])  # ProphetNet's masks, which begin as integers
        elif func is Tensor.scatter_reduce and any(_is_double(value) for value in (*args[1:], *kwargs.values())):
            args = (_widen(args[0]), *args[1:])  # TAPAS's zeros to reduce into
        elif func is F.batch_norm and _is_double(args[0]):  # Granite Speech 5 keeps its statistics in float32
            args = (args[0], *map(_widen, args[1:]))
        elif func is torch._grouped_mm and _is_double(args[0]):  # takes no float64: transformers' own way without it
            return torch.ops.transformers.grouped_mm_fallback(*args, offs=kwargs["offs"])
        elif func in _PRODUCTS and any(_is_double(arg) for arg in args):
            args = tuple(_widen(arg) for arg in args)
        return func(*args, **kwargs)


def _is_double(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float64


def _widen(value: Any) -> Any:
    """Float64 for float32, be it a dtype or a tensor."""
    if value is torch.float32:
        return torch.float64
    if isinstance(value, Tensor) and value.dtype == torch.float32:
        return value.double()
    return value


def _overflows(fill_value: float = 0.0, **_: Any) -> bool:
    """Whether a value is infinite in float32."""
    return abs(fill_value) > torch.finfo(torch.float32).max
