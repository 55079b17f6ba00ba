"""Products of float32 matrices by a processor's units for tiles of bfloat16 numbers (Intel's AMX).

These units multiply sixteen times as fast as the vector units with which BLAS multiplies float32. Each number is the
sum of three of bfloat16, exactly; six of the nine products of the parts of two numbers make theirs, up to less than a
rounding error. Products of parts are exact, and sums are in float32, so the error is that of float32: against float64
it is a little below that of MKL. What differs: numbers under 1e-33 lose digits, since the units take those under 1e-38
as zero. Matrices with infinities or NaNs are left to torch.

Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For Higher-Precision
Computations", 2019. The code in C++ is compiled on first use; which products are faster, `linear_timing` measures.
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
"""Multiplications that are worth another thread."""
_ARGUMENTS = struct.Struct("14q").pack


@cache
def why_not() -> str | None:
    """Why there are none of these products here, if so. With units for tiles, compiles the library unless cached."""
    if "amx_bf16" not in build.processor():
        return "the processor has no units for tiles (AMX)"
    missing = build.why_not(_library)
    return "the system does not permit AMX" if missing is None and _library()[2]() else missing


def fits(left: Tensor, right: Tensor) -> bool:
    """Whether `product` takes these matrices: of float32, dense in one dimension, and large enough to gain."""
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
    """``left @ right.T + bias``, without gradients.

    Args:
        left_MK, right_NK: in float32; one of the strides of each is 1.
        out_MN: where the result goes, with dense rows, which ``bias`` does not go with; ``None``: a new tensor.
        add: add to what is in ``out_MN``, which becomes NaN where an operand is infinite.
        plain: compute in plain C++ what the units would compute: slowly, on any processor.
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
    """The strides of a matrix; where it has one row or column, its stride may be any."""
    row, column = x.stride()
    return (row, 1) if x.shape[1] == 1 else (1, column) if x.shape[0] == 1 and column != 1 else (row, column)


@cache
def _library() -> tuple[Callable[[bytes], int], bool, Callable[[], int]]:
    """The compiled function, whether it can use several threads, and what asks the system for the units."""
    library = build.load("split_product.cpp")
    library.oslo_split_product.argtypes = (ctypes.c_char_p,)
    return library.oslo_split_product, bool(library.oslo_split_threads()), library.oslo_split_ready
