"""Products of float32 matrices by bfloat16 tile units (Intel's AMX).

These units multiply sixteen times as fast as the vector units with which BLAS multiplies float32. Each float32 number
is exactly the sum of three bfloat16 parts. Six of the nine products of two numbers' parts give their product, up to
less than a rounding error. Products of parts are exact, and sums are in float32, so the accuracy is float32 accuracy.
The error against float64 is a little below MKL's error. One thing differs: numbers under 1e-33 lose digits, since the
units flush numbers under 1e-38 to zero. Matrices with infinities or NaNs are left to torch.

Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations", 2019. The C++ code is compiled on first use. `linear_timing` measures which products are faster.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from oslo_kernels import build, huge_pages

FEWEST_ROWS = 32
"""With fewer rows on either side, most of a tile would be empty."""
_PER_THREAD = 1 << 24
"""Multiplications per additional thread."""
_ARGUMENTS = struct.Struct("14q").pack


@cache
def unavailable_reason() -> str | None:
    """Return why these products are unavailable, or ``None``. With AMX, compile the library unless it is cached."""
    if "amx_bf16" not in build.processor():
        return "the processor has no units for tiles (AMX)"
    missing = build.unavailable_reason(_library)
    return "the system does not permit AMX" if missing is None and _library()[2]() else missing


def fits(left: Tensor, right: Tensor) -> bool:
    """Return whether `product` takes these matrices: float32, dense in one dimension, and large enough to gain."""
    return all(
        x.dtype is torch.float32 and x.is_cpu and x.dim() == 2 and 1 in x.stride() and x.shape[0] >= FEWEST_ROWS
        for x in (left, right)
    )


def product(
    left_MK: Tensor,
    right_NK: Tensor,
    bias_N: Tensor | None = None,
    out_MN: Tensor | None = None,
    *,
    add: bool = False,
    plain: bool = False,
) -> Tensor:
    """Compute ``left @ right.T + bias``, without gradients.

    Args:
        left_MK, right_NK: float32 matrices. One of the two strides of each is 1.
        out_MN: the output tensor, with dense rows. It excludes ``bias``. ``None`` allocates a new tensor.
        add: add the product to ``out_MN``. Elements become NaN where an operand is infinite.
        plain: emulate the units in plain C++. This is slow, but works on any processor.
    """
    (M, K), N = left_MK.shape, len(right_NK)
    if out_MN is None:
        out_MN = huge_pages.fresh(left_MK.new_empty(M, N))
        if add := bias_N is not None:
            out_MN.copy_(bias_N)
    if not K and not add:
        out_MN.zero_()
    function, threaded, _ = _library()
    threads = min(torch.get_num_threads(), 1 + M * N * K // _PER_THREAD) if threaded else 1
    pointers = left_MK.data_ptr(), right_NK.data_ptr(), out_MN.data_ptr()
    strides = *_strides(left_MK), *_strides(right_NK), out_MN.stride(0)
    strange = function(_ARGUMENTS(*pointers, M, N, K, *strides, add, threads, plain))
    if strange and bias_N is not None:
        return torch.addmm(bias_N, left_MK, right_NK.T)
    return torch.mm(left_MK, right_NK.T, out=out_MN) if strange and not add else out_MN


def _strides(x: Tensor) -> tuple[int, int]:
    """Return the strides of a matrix. A dimension of size 1 may have any stride, so one that fits is chosen."""
    row, column = x.stride()
    return (row, 1) if x.shape[1] == 1 else (1, column) if x.shape[0] == 1 and column != 1 else (row, column)


@cache
def _library() -> tuple[Callable[[bytes], int], bool, Callable[[], int]]:
    """Return the compiled function, whether it can use several threads, and the function that requests the units."""
    library = build.load("split_product.cpp")
    library.oslo_split_product.argtypes = (ctypes.c_char_p,)
    return library.oslo_split_product, bool(library.oslo_split_threads()), library.oslo_split_ready
