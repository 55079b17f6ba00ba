"""Matrix products in float8 with dynamic scales, by ``torch._scaled_mm``.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022. The recipes follow torchao's float8 training.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels.language import jit, launch, tl, triton, wide
from oslo_kernels.operation import is_plain

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""The dimensions of a product on a GPU are multiples of this number."""
BLOCK = 64
"""The rows and columns of the tile that one program casts."""
SMALLEST = 1e-12
"""The lower bound of the largest element when the scale is computed, for tensors of zeros."""


def largest(x: Tensor, dim: int | None) -> Tensor:
    """Return the largest absolute value in float32: of all elements or, with ``dim``, along this dimension (kept)."""
    if not x.numel():
        shape = () if dim is None else (1, x.shape[1]) if dim == 0 else (x.shape[0], 1)
        return x.new_zeros(shape, dtype=torch.float32)
    found: Tensor = torch.linalg.vector_norm(x, math.inf, dim, keepdim=dim is not None)  # one pass
    return found.float()


def scale_of(largest: Tensor, dtype: torch.dtype, power_of_two: bool = False) -> Tensor:
    """Return the scale that maps the largest element to the largest number of the dtype.

    Args:
        power_of_two: round the scale down to a power of two, so that the multiplication is exact.
    """
    scale = torch.finfo(dtype).max / largest.double().clamp(min=SMALLEST)
    return (torch.exp2(torch.floor(torch.log2(scale))) if power_of_two else scale).float()


def cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Round ``x * scale`` to the dtype and saturate at its largest number."""
    limit = torch.finfo(dtype).max
    kind = wide(x.dtype)
    return (x.to(kind) * scale.to(kind)).clamp(-limit, limit).to(dtype)


def casts(x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False) -> tuple[Any, Any]:
    """Return `cast` of a matrix, contiguous, and its contiguous transpose, each if it is wanted: in one pass on GPUs.

    Args:
        rows, columns: whether the cast matrix and its transpose are wanted.
    """
    if x.is_cuda and triton is not None and x.numel() and is_plain(x) and not torch.compiler.is_compiling():
        return casts_triton(x, scale, dtype, rows, columns)
    found = cast(x, scale, dtype)
    return found.contiguous() if rows else None, found.T.contiguous() if columns else None


@jit
def cast_kernel(
    x_ptr, scale_ptr, rows_ptr, columns_ptr, M, N, x_row, x_column, scale_row, scale_column, limit,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (m < M) & (n < N)
    x = tl.load(x_ptr + m * x_row + n * x_column, mask=inside, other=0.0).to(tl.float32)
    scaled = x * tl.load(scale_ptr + m * scale_row + n * scale_column, mask=inside, other=0.0)
    scaled = tl.clamp(scaled, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    if ROWS:
        tl.store(rows_ptr + m * N + n, scaled.to(rows_ptr.dtype.element_ty), mask=inside)
    if COLUMNS:
        turned = tl.trans(scaled).to(columns_ptr.dtype.element_ty)
        tl.store(columns_ptr + tl.trans(n) * M + tl.trans(m), turned, mask=tl.trans(inside))


def casts_triton(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False
) -> tuple[Any, Any]:
    """`casts` by one kernel. It reads each element once and writes each cast once."""
    M, N = x.shape
    made = [
        x.new_empty(shape, dtype=dtype) if wanted else None for shape, wanted in (((M, N), rows), ((N, M), columns))
    ]
    own = [x if each is None else each for each in made]
    strides = (*x.stride(), *scale.expand(M, N).stride())
    flags = {"ROWS": rows, "COLUMNS": columns, "BLOCK": BLOCK}
    grid = (-(-M // BLOCK), -(-N // BLOCK))
    launch(cast_kernel, grid, x, scale, *own, M, N, *strides, torch.finfo(dtype).max, **flags)
    return made[0], made[1]


def padded(x: Tensor) -> Tensor:
    """Pad the rows of a float8 matrix with zeros to a multiple of `ALIGNMENT`. Products do not change."""
    missing = -x.shape[1] % ALIGNMENT
    return F.pad(x.view(torch.uint8), (0, missing)).view(x.dtype) if missing else x


def product(x: Tensor, y: Tensor, x_scale: Tensor, y_scale: Tensor, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Compute ``(x / x_scale) @ (y / y_scale).T``, accumulated at least in float32.

    Args:
        x, y: ``[M, K]`` and ``[N, K]`` in float8, contiguous.
        x_scale, y_scale: one scale for all elements, or ``[M, 1]`` and ``[N, 1]``.
        dtype: the dtype of the result ``[M, N]``. float64, on a CPU, computes in float64.
        fast: whether tensor cores may accumulate in fewer bits, as is usual in the forward pass.
    """
    if dtype == torch.float64 or not (x.numel() and y.numel()):
        kind = torch.promote_types(dtype, torch.float32)
        return ((x.to(kind) / x_scale) @ (y.to(kind) / y_scale).T).to(dtype)
    of_rows = x_scale.dim() > 0
    made = torch.bfloat16 if x.is_cuda and of_rows else dtype  # the only output dtype of CUTLASS's row-wise product
    if x.is_cuda:
        x, y = padded(x), padded(y)
    scales = (x_scale.reciprocal(), y_scale.reciprocal())
    own = (scales[0].contiguous(), scales[1].T.contiguous() if of_rows else scales[1])
    return torch._scaled_mm(x, y.T, *own, out_dtype=made, use_fast_accum=fast and x.is_cuda).to(dtype)
