"""Linear layers on a CPU: products of few rows of activations, which decoding makes, and products in half precision.

A product of few rows could take as long as its weights take to be read; BLAS, made for many rows, takes up to three
times as long. And where a processor has no instructions for numbers of 16 bits, torch's products of these are up to
twenty times as slow as those of float32. Compiled on first use; where there is no compiler, torch computes all of it.

Which of the two is faster depends on the processor, the shape and the number of threads: `linear_timing` measures it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oslo_kernels.build import BuildError, load

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_ROWS, MOST_ROWS_IO, MOST_ROWS_HALF = 16, 8, 32
"""Up to how many rows weights ``[out, in]`` and ``[in, out]`` of float32, and any of 16 bits, are multiplied here."""
FEWEST_OUTPUTS = 8
"""A product of fewer columns is torch's."""
WIDENED = 1 << 22
"""How many weights of 16 bits are held in float32 at a time, for more rows than that."""
OF_A_THREAD = 1 << 17
"""With how many weights a thread is worth waking."""
_ARGUMENTS = struct.Struct("10q").pack


@dataclass(frozen=True)
class FasterRows:
    """The numbers of rows for which a product is faster here than in torch.

    Attributes:
        threads: torch's number of threads when this was measured; with another number, torch computes.
    """

    rows: frozenset[int]
    dtype: torch.dtype
    threads: int

    def has(self, rows: int, dtype: torch.dtype) -> bool:
        """Whether a product of so many rows is known to be faster here."""
        return rows in self.rows and dtype is self.dtype and torch.get_num_threads() == self.threads


def linear(x: Tensor, weight_oi: Tensor, bias: Tensor | None = None, faster: FasterRows | None = None) -> Tensor:
    """``F.linear``: ``[..., in]`` to ``[..., out]``. Without gradients, on a CPU, it may be computed here.

    Args:
        faster: limits products of few rows to these; ``None``: all of them are computed here.
    """
    return _product(x, weight_oi, bias, F.linear, False, faster)


def conv1d(x: Tensor, weight_io: Tensor, bias: Tensor | None = None, faster: FasterRows | None = None) -> Tensor:
    """As `linear`, for transformers' ``Conv1D``, whose weight is ``[in, out]``."""
    return _product(x, weight_io, bias, plain_conv1d, True, faster)


def plain_conv1d(x: Tensor, weight_io: Tensor, bias: Tensor | None = None) -> Tensor:
    """What transformers' ``Conv1D`` computes."""
    if bias is None:
        return x @ weight_io
    return torch.addmm(bias, x.view(-1, x.shape[-1]), weight_io).view(*x.shape[:-1], weight_io.shape[1])


@cache
def why_not() -> str | None:
    """Why everything is left to torch, if it is. Compiles, unless this machine has done so before."""
    try:
        _library()
    except (BuildError, OSError) as error:
        return str(error).splitlines()[0]
    return None


def why_torch(weight: Tensor, bias: Tensor | None, io: bool) -> str | None:
    """Why torch computes all products of few rows with this weight, if it does; compiles as `why_not` does."""
    dtype = weight.dtype
    if dtype not in _KINDS:
        return f"torch computes products of {dtype}"
    if not _fits(weight, dtype) or (bias is not None and not _fits(bias, dtype)):
        return "weight or bias is no plain, contiguous CPU tensor of the layer's dtype"
    if weight.shape[io] < FEWEST_OUTPUTS:
        return f"fewer than {FEWEST_OUTPUTS} outputs"
    if dtype is not torch.float32 and _is_native(dtype):
        return f"the processor has instructions for {dtype}, which torch uses"
    return why_not()


def most_rows(dtype: torch.dtype, io: bool) -> int:
    """Up to how many rows a product may be computed here."""
    return MOST_ROWS_HALF if dtype is not torch.float32 else MOST_ROWS_IO if io else MOST_ROWS


_Plain = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, plain: _Plain, io: bool, faster: FasterRows | None
) -> Tensor:
    # A model that decodes comes here a hundred times a token: what is asked is asked in the cheapest way.
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not x.is_cpu or not _is_usual(x, weight, bias):
        return plain(x, weight, bias)
    inner, outer = weight.shape if io else weight.shape[::-1]
    rows = x.numel() // inner if inner else 0
    half = x.dtype is not torch.float32
    if x.shape[-1] != inner or outer < FEWEST_OUTPUTS or not rows or (half and _is_native(x.dtype)) or why_not():
        return plain(x, weight, bias)
    if rows <= most_rows(x.dtype, io):
        if faster is not None and not faster.has(rows, x.dtype):
            return plain(x, weight, bias)
        return _of_few_rows(x, weight, bias, rows, inner, outer, io)
    return _widened(x, weight, bias, plain, io) if half else plain(x, weight, bias)


def _is_usual(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these are plain, dense tensors of one type, and nobody asks for another one."""
    dtype = x.dtype
    if type(x) is not Tensor or dtype not in _KINDS or torch.is_autocast_enabled("cpu"):
        return False
    return _fits(weight, dtype) and (bias is None or _fits(bias, dtype))


def _fits(parameter: Tensor, dtype: torch.dtype) -> bool:
    kind = type(parameter)
    plain = kind is nn.Parameter or kind is Tensor
    return plain and parameter.dtype is dtype and parameter.is_cpu and parameter.is_contiguous()


def _of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, inner: int, outer: int, io: bool) -> Tensor:
    x, out = x.contiguous(), x.new_empty((*x.shape[:-1], outer))
    run, threaded = _library()
    threads = min(torch.get_num_threads(), 1 + inner * outer // OF_A_THREAD) if threaded else 1
    pointers = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    run(_ARGUMENTS(*pointers, rows, inner, outer, _KINDS[x.dtype], io, threads))
    return out


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None, plain: _Plain, io: bool) -> Tensor:
    """The product in float32, of parts of the weights."""
    dim = int(io)
    parts = weight.split(max(1, WIDENED // weight.shape[1 - dim]), dim)
    wide = x.float()
    out = torch.cat([plain(wide, part.float(), None) for part in parts], -1)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


@cache
def _is_native(dtype: torch.dtype) -> bool:
    """Whether oneDNN, which torch hands products of 16 bits to, has instructions for them."""
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")())


@cache
def _library() -> tuple[Callable[[bytes], None], bool]:
    """The function, and whether it may be given several threads."""
    library = load("linear.cpp")
    library.oslo_linear.argtypes, library.oslo_linear.restype = [ctypes.c_char_p], None
    return library.oslo_linear, bool(library.oslo_linear_threads())
