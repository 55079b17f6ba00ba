"""Import Triton if it is installed. Operations can be imported without it, but their kernels cannot be launched."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from oslo_kernels.shapes import one_device

__all__ = ["jit", "launch", "power_of_two", "rows_of", "strips", "tl", "triton", "wide"]

try:
    import triton
    import triton.language as tl
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=int)

jit: Callable[..., Any] = triton.jit if triton is not None else lambda kernel: kernel


def power_of_two(size: int, limit: int) -> int:
    """Return the smallest power of two that is at least ``size``, limited to ``limit``."""
    return min(limit, 1 << max(0, size - 1).bit_length())


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the compute dtype of operations on ``dtype``: float32 for half precision."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def rows_of(x: Tensor) -> Tensor:
    """Flatten all dimensions of ``x`` except the last, with contiguous rows. Copy only if necessary."""
    matrix = x.reshape(-1, x.shape[-1])
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def strips(rows: int) -> int:
    """Return the number of programs that share the rows of a reduction."""
    return max(1, min(256, rows // 4))


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Launch a kernel on the device of its tensors and the current stream.

    Raises:
        ValueError: the tensors are on several devices.
    """
    device = one_device(arguments)
    with torch.cuda.device(device.index if device.type == "cuda" else -1):
        kernel[grid](*arguments, num_warps=num_warps, **constants)
