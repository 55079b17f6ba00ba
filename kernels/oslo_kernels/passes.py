"""Norms and rotary positions on a CPU in one pass over memory each way, instead of torch's many passes.

They use torch's threads. The code is compiled on first use. If it cannot be, `unavailable_reason` says why.
Double backward is left to torch. For few rows without gradients see `small_operations`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from oslo_kernels import build
from oslo_kernels.operation import is_plain

_PER_THREAD = 1 << 15
"""Elements per additional thread."""
_DTYPES = (torch.float32, torch.float64)
_NORM, _ROTATION = struct.Struct("11q2d").pack, struct.Struct("28q").pack


@cache
def unavailable_reason() -> str | None:
    """Return why these operations are unavailable, or ``None``. Compile the library unless it is cached."""
    return build.unavailable_reason(_library)


def computes(x: Tensor, *others: Tensor) -> bool:
    """Return whether these tensors are supported: plain, of one dtype, on a CPU, outside of `torch.func`."""
    if torch.compiler.is_compiling() or not x.numel() or x.dtype not in _DTYPES:
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return all(is_plain(each) and each.is_cpu and each.dtype is x.dtype for each in (x, *others))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * (weight + offset)`` of ``[..., N]`` and ``[N]`` that satisfy `computes`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    made: Tensor = _RMSNorm.apply(x, weight, eps, offset)
    return made


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """`rms_norm` by operations of torch."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + offset)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        dense = x.contiguous()
        out, scale = torch.empty_like(dense), dense.new_empty(dense.numel() // dense.shape[-1])
        _norm((dense, weight, out, scale, None, None, None), eps, offset)
        ctx.save_for_backward(x, weight, scale)
        ctx.options = eps, offset
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            wanted = [each for each, needed in zip((x, weight), ctx.needs_input_grad, strict=False) if needed]
            out = plain_rms_norm(x, weight, *ctx.options)
            found = iter(torch.autograd.grad(out, wanted, grads[0], create_graph=True))
            return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None
        x, grad = x.contiguous(), grads[0].contiguous()
        of_x = torch.empty_like(x)
        of_weight = x.new_zeros(_threads(x), x.shape[-1])
        _norm((x, weight, None, scale, grad, of_x, of_weight), *ctx.options)
        return of_x, of_weight.sum(0), None, None


def _norm(tensors: tuple[Tensor | None, ...], eps: float, offset: float) -> None:
    x = tensors[0]
    assert x is not None
    width = x.shape[-1]
    sizes = x.numel() // width, width, x.dtype is torch.float64, _threads(x)
    _library().norm(_NORM(*(0 if each is None else each.data_ptr() for each in tensors), *sizes, eps, offset))


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``x * cos + rotate_half(x) * sin`` of queries and keys that satisfy `computes`.

    Args:
        query, key: ``[batch, heads, length, width]``.
        cos, sin: ``[batch or 1, length, turned]``, without gradients. The elements of a head after the first ``turned``
            are copied. ``turned`` is even.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    made: tuple[Tensor, Tensor] = _Rotate.apply(query, key, cos.contiguous(), sin.contiguous(), False)
    return made


class _Rotate(torch.autograd.Function):
    """The rotation, or its gradient, which is a rotation too."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, is_backward: bool
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.is_backward = is_backward
        query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
        batch, _, length, width = query.shape
        turned = cos.shape[-1]
        results = torch.empty_like(query), torch.empty_like(key)
        heads = [
            value
            for x, out in zip((query, key), results, strict=True)
            for value in (x.data_ptr(), out.data_ptr(), x.shape[1], *x.stride()[:3], *out.stride()[:3])
        ]
        table = length * turned if len(cos) > 1 else 0
        sizes = batch, length, width, turned, table, query.dtype is torch.float64, is_backward, _threads(query)
        _library().rotate(_ROTATION(*heads, cos.data_ptr(), sin.data_ptr(), *sizes))
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_Rotate.apply(*grads, *ctx.saved_tensors, not ctx.is_backward), None, None, None


def _threads(x: Tensor) -> int:
    return min(torch.get_num_threads(), 1 + x.numel() // _PER_THREAD) if _library().has_threads else 1


class _Library(NamedTuple):
    norm: Callable[[bytes], None]
    rotate: Callable[[bytes], None]
    has_threads: bool


@cache
def _library() -> _Library:
    library = build.load("passes.cpp")
    functions = library.oslo_norm, library.oslo_rotate_many
    for function in functions:
        function.argtypes, function.restype = [ctypes.c_char_p], None
    return _Library(*functions, bool(library.oslo_passes_threads()))
