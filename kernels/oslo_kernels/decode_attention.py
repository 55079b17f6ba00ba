"""Attention of one query per row over a cache of keys and values, as in decoding, on a CPU.

Torch's fused attention is made for many queries. For one query, it computes one-row matrix products and softmaxes block
by block, and takes up to ten times as long as reading the keys and values. The C++ code reads keys and values once for
all heads that share them, and skips masked keys. It is compiled on first use. If it cannot be compiled,
`unavailable_reason` says why.

Legend:
    B: rows.
    H: heads.
    G: key-value heads.
    L: keys.
    D: size of a head.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from oslo_kernels import build

ELEMENTS_PER_THREAD = 1 << 16
"""Elements of keys per additional thread."""
_DTYPES = (torch.float32, torch.float64)
_ARGUMENTS = struct.Struct("26qd").pack


@cache
def unavailable_reason() -> str | None:
    """Return why attention is left to torch, or ``None``. Compile the library unless it is cached."""
    return build.unavailable_reason(_library)


def computes(query: Tensor, key: Tensor, value: Tensor, masks: tuple[Tensor | None, ...]) -> bool:
    """Return whether `attend` takes these: one query per row, plain tensors of one dtype, no gradients or compiler."""
    if query.shape[-2] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    dtype = query.dtype
    if dtype not in _DTYPES or not all(_fits(x, dtype) for x in (query, key, value)) or key.shape[-2] == 0:
        return False
    shape = (*query.shape[:3], key.shape[-2])
    if key.shape[:3] != value.shape[:3] or (key.shape[0], key.shape[-1]) != (shape[0], query.shape[-1]):
        return False  # torch broadcasts or rejects these
    return query.shape[1] % key.shape[1] == 0 and all(mask is None or _masks(mask, dtype, shape) for mask in masks)


def _fits(x: Tensor, dtype: torch.dtype) -> bool:
    return type(x) is Tensor and x.dtype is dtype and x.is_cpu and x.dim() == 4 and x.stride(-1) == 1


def _masks(mask: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> bool:
    if type(mask) is not Tensor or not mask.is_cpu or mask.dim() != 4 or mask.dtype not in (torch.bool, dtype):
        return False
    fits = all(size in (1, full) for size, full in zip(mask.shape[:3], shape, strict=False))
    return fits and mask.shape[-1] == shape[-1] and (mask.stride(-1) == 1 or mask.shape[-1] == 1)


def attend(
    query_BH1D: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    scaling: float,
    shown_BH1L: Tensor | None = None,
    added_BH1L: Tensor | None = None,
) -> Tensor:
    """Compute ``softmax(scaling * query @ key.T + added) @ value`` of tensors that satisfy `computes`.

    Args:
        shown_BH1L: true for visible keys. Rows without visible keys give zeros.
        added_BH1L: the additive mask, in the dtype of the queries. Masks may broadcast over rows and heads.

    Returns:
        ``[B, 1, H, D]``, dense.
    """
    out = query_BH1D.new_empty(query_BH1D.shape[0], 1, query_BH1D.shape[1], value_BGLD.shape[-1])
    given = arguments(query_BH1D, key_BGLD, value_BGLD, scaling, shown_BH1L, added_BH1L, out)
    _library()[0](_ARGUMENTS(*given))
    return out


def arguments(
    query_BH1D: Tensor,
    key_BGLD: Tensor,
    value_BGLD: Tensor,
    scaling: float,
    shown_BH1L: Tensor | None,
    added_BH1L: Tensor | None,
    out_B1HD: Tensor,
) -> tuple[float, ...]:
    """Return the C++ arguments of `attend` with the output ``out``. They hold addresses: keep the tensors alive."""
    (batch, heads, _, width), (_, groups, keys, _) = query_BH1D.shape, key_BGLD.shape
    threads = min(torch.get_num_threads(), 1 + batch * groups * keys * width // ELEMENTS_PER_THREAD)
    return (
        *(query_BH1D.data_ptr(), key_BGLD.data_ptr(), value_BGLD.data_ptr()),
        *(0 if mask is None else mask.data_ptr() for mask in (shown_BH1L, added_BH1L)),
        *(out_B1HD.data_ptr(), batch, heads, groups, keys, width, out_B1HD.shape[-1]),
        *(*query_BH1D.stride()[:2], *key_BGLD.stride()[:3], *value_BGLD.stride()[:3]),
        *(*_strides(shown_BH1L), *_strides(added_BH1L)),
        *(query_BH1D.dtype is torch.float64, threads if _library()[1] else 1, scaling),
    )


def result_only(out_B1HD: Tensor) -> tuple[float, ...]:
    """Return `arguments` for an attention output that is computed already."""
    return (*(0,) * 5, out_B1HD.data_ptr(), *(0,) * 20, 0.0)


def _strides(mask: Tensor | None) -> tuple[int, int]:
    """Return the strides of rows and heads, with 0 for broadcast dimensions."""
    if mask is None:
        return 0, 0
    first, second = (mask.stride(dim) if mask.shape[dim] > 1 else 0 for dim in (0, 1))
    return first, second


@cache
def _library() -> tuple[Callable[[bytes], None], bool]:
    """Return the compiled function, and whether it can use several threads."""
    library = build.load("attention.cpp")
    library.oslo_attend.argtypes, library.oslo_attend.restype = [ctypes.c_char_p], None
    return library.oslo_attend, bool(library.oslo_attend_threads())
