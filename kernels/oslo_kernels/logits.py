"""The two passes of `cross_entropy` over the logits on a CPU, in C++. Torch's operations take ten passes.

They use torch's threads. The code is compiled on first use. If it cannot be, `unavailable_reason` says why.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from oslo_kernels import build

_PER_THREAD = 1 << 15
"""Logits per additional thread."""
_ARGUMENTS = struct.Struct("9q2d").pack
ELSEWHERE, IGNORED = -1, -2
"""Values in place of a target's column: the target is on another rank; the row is ignored."""


@cache
def unavailable_reason() -> str | None:
    """Return why the C++ passes are unavailable, or ``None``. Compile the library unless it is cached."""
    return build.unavailable_reason(_library)


def computes(logits_Nv: Tensor) -> bool:
    """Return whether these logits are supported: plain, in float32 or float64, with dense rows on a CPU."""
    usual = type(logits_Nv) is Tensor and logits_Nv.is_cpu and logits_Nv.dtype in (torch.float32, torch.float64)
    return bool(usual and logits_Nv.numel() and logits_Nv.stride(1) == 1 and unavailable_reason() is None)


def statistics(logits_Nv: Tensor, column_N: Tensor) -> Tensor:
    """Return maximum, sum of ``exp(logit - maximum)``, target's logit (or 0) and sum of logits per row, ``[4, N]``."""
    made = logits_Nv.new_empty(4, len(logits_Nv))
    _run(logits_Nv, column_N, made, None, 0.0, 0.0)
    return made


def replace_by_gradient_(logits_Nv: Tensor, column_N: Tensor, log_total_N: Tensor, hit: float, rest: float) -> None:
    """Replace logits by ``exp(logit - log_total) - rest``, minus ``hit`` for the target. Ignored rows become zeros."""
    _run(logits_Nv, column_N, None, log_total_N.contiguous(), hit, rest)


def _run(x: Tensor, column_N: Tensor, made: Tensor | None, log_total_N: Tensor | None, hit: float, rest: float) -> None:
    function, threaded = _library()
    pointers = [0 if each is None else each.data_ptr() for each in (x, column_N, made, log_total_N)]
    threads = min(torch.get_num_threads(), 1 + x.numel() // _PER_THREAD) if threaded else 1
    function(_ARGUMENTS(*pointers, *x.shape, x.stride(0), x.dtype is torch.float64, threads, hit, rest))


@cache
def _library() -> tuple[Callable[[bytes], None], bool]:
    """Return the compiled function, and whether it can use several threads."""
    library = build.load("logits.cpp")
    library.oslo_logits.argtypes, library.oslo_logits.restype = [ctypes.c_char_p], None
    return library.oslo_logits, bool(library.oslo_logits_threads())
