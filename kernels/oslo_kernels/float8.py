"""Matrix products in float8 with dynamic scales, by ``torch._scaled_mm``.

Sources: Micikevicius et al., "FP8 Formats for Deep Learning", 2022. The recipes follow torchao's float8 training.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels.language import wide

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ALIGNMENT = 16
"""The dimensions of a product on a GPU are multiples of this number."""
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
