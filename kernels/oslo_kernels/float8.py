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
BLOCK_M, BLOCK_N = 8, 512
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
    """Return `cast` of a matrix, contiguous, and its contiguous transpose, each if it is wanted.

    Args:
        rows, columns: whether the cast matrix and its transpose are wanted.
    """
    if x.is_cuda and triton is not None and x.numel() and is_plain(x) and not torch.compiler.is_compiling():
        return casts_triton(x, scale, dtype, rows, columns)
    found = cast(x, scale, dtype)
    return found.contiguous() if rows else None, found.T.contiguous() if columns else None


@jit
def cast_kernel(
    x_ptr, scale_ptr, out_ptr, M, N, limit, OF_ROWS: tl.constexpr, OF_COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    n = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    inside = (m < M) & (n < N)
    x = tl.load(x_ptr + m * N + n, mask=inside, other=0.0).to(tl.float32)
    if OF_ROWS:
        scale = tl.load(scale_ptr + m, mask=m < M, other=0.0)
    elif OF_COLUMNS:
        scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    else:
        scale = tl.load(scale_ptr)
    scaled = tl.clamp(x * scale, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    tl.store(out_ptr + m * N + n, scaled.to(out_ptr.dtype.element_ty), mask=inside)


def casts_triton(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool = True, columns: bool = False
) -> tuple[Any, Any]:
    """`casts` by a kernel, which keeps the order of elements in memory, and torch's copy for the other order.

    Triton 3.6 corrupts float8 tensors whose layout it converts between threads, as a transpose in the kernel requires:
    on an H100, up to half of the elements were wrong.
    """
    turned = not x.is_contiguous() and x.T.is_contiguous()
    same = _cast_in_order(x.T, scale.T if scale.dim() else scale, dtype) if turned else _cast_in_order(x, scale, dtype)
    other = same.view(torch.uint8).T.contiguous().view(dtype) if (rows if turned else columns) else None
    first, second = (other, same) if turned else (same, other)
    return first if rows else None, second if columns else None


def _cast_in_order(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    x, scale = x.contiguous(), scale.contiguous()
    M, N = x.shape
    out = torch.empty_like(x, dtype=dtype)
    of_rows, of_columns = (scale.dim() == 2 and scale.shape[dim] > 1 for dim in (0, 1))
    flags = {"OF_ROWS": of_rows, "OF_COLUMNS": of_columns, "BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    grid = (-(-M // BLOCK_M), -(-N // BLOCK_N))
    launch(cast_kernel, grid, x, scale, out, M, N, torch.finfo(dtype).max, **flags)
    return out


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
