"""Ban tokens that would repeat an n-gram: set their scores to minus infinity, in place.

One source is compiled for CPU and GPU: for GPUs at installation if ``nvcc`` was available, otherwise on first use.
Without a compiler, Triton or plain torch computes the operation. Shapes: R rows, S rows of the source, V tokens in the
vocabulary, L length, W windows of n tokens.
"""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oslo_kernels.build import BuildError, load
from oslo_kernels.language import jit, launch, power_of_two, tl, triton
from oslo_kernels.shapes import one_device

_MINUS_INFINITY = {
    torch.float32: (4, 0xFF800000),
    torch.float64: (8, 0xFFF0000000000000),
    torch.bfloat16: (2, 0xFF80),
    torch.float16: (2, 0xFC00),
}
"""The size of a score in bytes, and the bits of minus infinity."""
_Integers = ctypes.c_uint64 * 15


def block_repeats_(scores_RV: Tensor, ids_RL: Tensor, size: int, source_SL: Tensor | None = None) -> Tensor:
    """Ban every token that would complete an n-gram which occurs in the row's source. Returns ``scores``.

    Args:
        scores_RV: the scores of each row's next token, of any floating dtype; changed in place.
        ids_RL: int64; the tokens of each row so far. Rows shorter than ``size - 1`` ban nothing.
        size: the length of an n-gram, at least 1.
        source_SL: int64; the source of the banned n-grams. Row ``r`` of ``ids`` uses row ``r // (R // S)`` of it.
            ``None``: ``ids`` themselves. Tokens outside the vocabulary are ignored.
    """
    source_SL = ids_RL if source_SL is None else source_SL
    one_device((scores_RV, ids_RL, source_SL))
    rows, length = ids_RL.shape
    sources, source_length = source_SL.shape
    if size < 1 or not 0 < sources <= max(rows, 1) or rows % sources:
        raise ValueError(f"n-grams of size {size}, {sources} sources for {rows} rows: rows are a multiple of sources")
    if scores_RV.shape[0] != rows or {ids_RL.dtype, source_SL.dtype} != {torch.int64}:
        raise ValueError(f"{scores_RV.shape[0]} rows of scores for {rows} rows of {ids_RL.dtype} and {source_SL.dtype}")
    if length < size - 1 or source_length < size or not rows:
        return scores_RV
    run = _compiled(scores_RV.device.type)
    strides, inner = zip(scores_RV.stride(), ids_RL.stride(), source_SL.stride(), strict=True)
    if run is not None and inner == (1, 1, 1) and (infinity := _MINUS_INFINITY.get(scores_RV.dtype)):
        pointers = scores_RV.data_ptr(), ids_RL.data_ptr(), source_SL.data_ptr()
        sizes = rows, length, source_length, rows // sources, scores_RV.shape[1], size
        run(scores_RV.device, (*pointers, *strides, *sizes, *infinity))
    elif scores_RV.is_cuda and triton is not None:
        _in_triton(scores_RV, ids_RL, size, source_SL)
    else:
        reference_(scores_RV, ids_RL, size, source_SL)
    return scores_RV


def reference_(scores_RV: Tensor, ids_RL: Tensor, size: int, source_SL: Tensor) -> None:
    """`block_repeats_` in plain torch, without synchronising with the device."""
    rows, vocab = scores_RV.shape
    source_RL = source_SL.repeat_interleave(rows // len(source_SL), 0)
    windows_RWn = source_RL.unfold(1, size, 1)
    prefix_R1n = ids_RL[:, ids_RL.shape[1] - size + 1 :].unsqueeze(1)
    last_RW = windows_RWn[..., -1]
    hits_RW = (windows_RWn[..., :-1] == prefix_R1n).all(-1) & (last_RW >= 0) & (last_RW < vocab)
    banned_RV = torch.zeros((rows, vocab + 1), dtype=torch.bool, device=scores_RV.device)
    banned_RV.scatter_(1, last_RW.masked_fill(~hits_RW, vocab), True)  # windows that ban nothing go to a spare column
    scores_RV.masked_fill_(banned_RV[:, :vocab], float("-inf"))


@cache
def _compiled(device: str) -> Any:
    """Return the compiled function for a type of device, or ``None`` if it cannot be compiled."""
    try:
        function = load("ngrams.cpp", cuda=device == "cuda").oslo_block_repeats
    except (BuildError, OSError) as error:
        if device == "cuda":
            instead = "torch" if triton is None else "Triton"
            warnings.warn(f"n-grams are blocked by {instead} instead of a CUDA kernel: {error}", stacklevel=3)
        return None
    function.argtypes, function.restype = [ctypes.c_void_p], ctypes.c_int
    if device == "cpu":
        return lambda device, values: function(_Integers(*values))

    def launch_on(device: torch.device, values: tuple[int, ...]) -> None:
        with torch.cuda.device(device):
            error = function(_Integers(*values, torch.cuda.current_stream(device).cuda_stream))
        if error:
            raise RuntimeError(f"the n-gram kernel was not launched: CUDA error {error}")

    return launch_on if _launches(launch_on) else None


def _launches(launch_on: Any) -> bool:
    """Return whether driver and GPU run the library, which may come from another machine. If not, Triton is used."""
    one = torch.zeros((1, 1), dtype=torch.long, device="cuda")
    try:
        launch_on(one.device, (*[one.data_ptr()] * 3, *[1] * 9, 8, 0))
    except RuntimeError:
        return False
    return True


@jit
def block_repeats_kernel(
    scores_ptr, ids_ptr, source_ptr, scores_stride, ids_stride, source_stride, length, windows, group, vocab,
    SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    starts = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = source_ptr + (row // group) * source_stride + starts
    prefix = ids_ptr + row * ids_stride + length - (SIZE - 1)
    hits = starts < windows
    for i in tl.static_range(SIZE - 1):
        hits &= tl.load(source + i, mask=starts < windows, other=-1) == tl.load(prefix + i)
    last = tl.load(source + (SIZE - 1), mask=hits, other=-1)
    tl.store(scores_ptr + row * scores_stride + last, float("-inf"), mask=hits & (last >= 0) & (last < vocab))


def _in_triton(scores_RV: Tensor, ids_RL: Tensor, size: int, source_SL: Tensor) -> None:
    ids_RL, source_SL = ids_RL.contiguous(), source_SL.contiguous()
    scores = scores_RV if scores_RV.stride(-1) == 1 else scores_RV.contiguous()
    windows = source_SL.shape[1] - size + 1
    block = power_of_two(windows, 1024)
    sizes = (ids_RL.shape[1], windows, len(ids_RL) // len(source_SL), scores.shape[1])
    strides = (scores.stride(0), ids_RL.stride(0), source_SL.stride(0))
    grid = (len(ids_RL), -(-windows // block))
    launch(block_repeats_kernel, grid, scores, ids_RL, source_SL, *strides, *sizes, SIZE=size, BLOCK=block)
    if scores is not scores_RV:
        scores_RV.copy_(scores)
