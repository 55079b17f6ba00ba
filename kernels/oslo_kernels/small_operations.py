"""Fused small operations for decoding on a CPU: one call instead of six or more.

Their calls take longer than their computation. They compute without gradients and in one thread, as torch does for
tensors of this size. The code is compiled on first use. If it cannot be, `unavailable_reason` says why.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from oslo_kernels import build

MOST = 1 << 15
"""Elements of the largest tensor to compute here. Torch divides larger tensors among its threads."""
_DTYPES = (torch.float32, torch.float64)
_NORM, _ROTATION = struct.Struct("6q2d").pack, struct.Struct("26q").pack


@cache
def unavailable_reason() -> str | None:
    """Return why these operations are unavailable, or ``None``. Compile the library unless it is cached."""
    return build.unavailable_reason(_library)


def computes(x: Tensor, other: Tensor) -> bool:
    """Return whether these tensors are supported: plain, small, of one dtype, without gradients or compiler."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_cpu:
        return False
    kind, dtype = type(other), x.dtype
    plain = kind is nn.Parameter or kind is Tensor or getattr(kind, "has_plain_storage", False)
    return bool(plain and dtype is other.dtype and dtype in _DTYPES and other.is_cpu and 0 < x.numel() <= MOST)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute ``x / sqrt(mean(x ** 2) + eps) * (weight + offset)`` of ``[..., N]`` and ``[N]`` that satisfy `computes`.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    pointers = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _library()[0](_NORM(*pointers, x.numel() // width, width, x.dtype is torch.float64, eps, offset))
    return out


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Compute ``x * cos + rotate_half(x) * sin`` of queries and keys that satisfy `computes` with ``cos``.

    Args:
        query, key: ``[batch, heads, length, width]``, dense in the last dimension.
        cos, sin: ``[batch or 1, length, turned]``, dense. The elements of a head after the first ``turned`` are copied.

    Source: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021.
    """
    batch, _, length, width = query.shape
    turned = cos.shape[-1]
    results = torch.empty_like(query), torch.empty_like(key)
    heads = [
        value
        for x, out in zip((query, key), results, strict=True)
        for value in (x.data_ptr(), out.data_ptr(), x.shape[1], *x.stride()[:3], *out.stride()[:3])
    ]
    table = length * turned if cos.shape[0] > 1 else 0
    sizes = batch, length, width, turned, table, query.dtype is torch.float64
    _library()[1](_ROTATION(*heads, cos.data_ptr(), sin.data_ptr(), *sizes))
    return results


@cache
def _library() -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
    library = build.load("small.cpp")
    for function in (library.oslo_rms_norm, library.oslo_rotate):
        function.argtypes, function.restype = [ctypes.c_char_p], None
    return library.oslo_rms_norm, library.oslo_rotate
