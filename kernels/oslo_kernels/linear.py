"""Linear layers on a CPU: products with few rows of activations, as in decoding, and products in half precision.

A product with few rows is limited by reading its weights. BLAS, optimised for many rows, takes up to three times as
long. The C++ code reads the weights once. It is compiled on first use; without a compiler, the other implementations
compute. On processors without instructions for 16-bit floats, torch multiplies half precision up to twenty times more
slowly than float32. Torch leaves float32 products to MKL, but also includes oneDNN. On some processors, oneDNN takes
half of MKL's time for 8 to 64 rows of activations, without repacking the weights. With AMX (`split_product`), products
of many rows take two thirds of MKL's time.

The fastest implementation depends on the processor, the shape and the number of threads. `linear_timing` measures it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.functional import linear as plain_linear  # not by its module's attribute, which DeepSpeed replaces
from torch.overrides import handle_torch_function, has_torch_function

from oslo_kernels import build, split_product

CPP, ONEDNN, SPLIT = "C++", "oneDNN", "AMX"
"""The implementations of a product in this package."""
MANY = (ONEDNN, SPLIT)
"""The implementations for many rows in float32, and for their gradients."""
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MOST_ROWS, MOST_ROWS_IO, MOST_ROWS_HALF = 16, 8, 32
"""The maximum rows in C++ for float32 weights ``[out, in]``, float32 weights ``[in, out]``, and 16-bit weights."""
FEWEST_OUTPUTS = 8
"""Products with fewer columns are left to torch."""
WIDENED = 1 << 22
"""The number of 16-bit weights that are converted to float32 at a time, above `MOST_ROWS_HALF` rows."""
WEIGHTS_PER_THREAD = 1 << 17
"""Weights per additional thread."""
_ARGUMENTS = struct.Struct("11q").pack


@dataclass(frozen=True)
class FasterRows:
    """The numbers of rows for which a product is faster here than in torch, with the fastest implementation.

    Attributes:
        ways: `CPP`, `ONEDNN` or `SPLIT`, by number of rows.
        many: the implementation for larger numbers of rows. ``None`` leaves them to torch.
        threads: torch's number of threads at the measurement. With another number, torch computes. ``None``: any.
    """

    ways: Mapping[int, str]
    many: str | None
    dtype: torch.dtype
    threads: int | None

    def way(self, rows: int, dtype: torch.dtype) -> str | None:
        """Return the implementation for this number of rows, or ``None`` for torch."""
        if dtype is not self.dtype or self.threads not in (None, torch.get_num_threads()):
            return None
        return self.ways.get(rows, self.many if rows > MOST_TIMED else None)


MOST_TIMED = 256
"""The largest number of rows that is timed. Its timing stands for all larger numbers."""
_UNTIMED = FasterRows({MOST_TIMED: SPLIT}, SPLIT, torch.float32, None)
"""The untimed default on a processor with AMX, for products of at least `LARGE` multiplications per thread."""
_UNTIMED_AMD = FasterRows(dict.fromkeys(range(1, MOST_TIMED + 1), ONEDNN), ONEDNN, torch.float32, None)
"""The untimed default on an AMD processor, where MKL takes up to twice the time of oneDNN."""
LARGE, FEWEST_SIDE = 1 << 26, 256
"""Minimum multiplications per thread for AMX, and minimum inputs and outputs for both defaults."""
FEWEST_WEIGHTS = 1 << 18
"""Minimum weights for oneDNN with fewer than `MOST_TIMED` rows. A call takes 15 to 25 us more than MKL's."""


def linear(x: Tensor, weight_oi: Tensor, bias: Tensor | None = None, faster: FasterRows | None = None) -> Tensor:
    """``F.linear``: ``[..., in]`` to ``[..., out]``, on a CPU possibly by another implementation than torch's.

    The C++ implementation computes only without gradients.

    Args:
        faster: the numbers of rows to compute here, with implementations. ``None``: all up to `most_rows`, in C++.
    """
    return _product(x, weight_oi, bias, plain_linear, False, faster)


def conv1d(x: Tensor, weight_io: Tensor, bias: Tensor | None = None, faster: FasterRows | None = None) -> Tensor:
    """`linear` for transformers' ``Conv1D``, with a weight ``[in, out]``."""
    return _product(x, weight_io, bias, plain_conv1d, True, faster)


def plain_conv1d(x: Tensor, weight_io: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute transformers' ``Conv1D`` in plain torch."""
    if bias is None:
        return x @ weight_io
    out = torch.addmm(bias, x.view(-1, x.shape[-1]), weight_io)
    return out.view(*x.shape[:-1], out.shape[1])  # dynamo cannot trace the shape of a weight that is a subclass


def untimed_linear(x: Tensor, weight_oi: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear``, by the implementation that is faster on this kind of processor as far as known.

    With AMX, it computes large products and their gradients. Otherwise, oneDNN computes float32 products on AMD
    processors, except for few rows with fewer than `FEWEST_WEIGHTS` weights. Measured on two cores of an AMD EPYC with
    one thread each, ms for 30 million weights:

    | weight | | 1 row | 2 rows | 8 rows | 16 rows | 64 rows | 256 rows |
    |---|---|---|---|---|---|---|---|
    | 1024 x 768 | MKL | 7.3 | 12.4 | 12.8 | 16.9 | 42.7 | 146 |
    | | oneDNN | 5.5 | 8.3 | 8.9 | 11.0 | 21.7 | 66 |
    | 2048 x 2048 | MKL | 6.6 | 13.4 | 12.4 | 16.7 | 42.0 | 143 |
    | | oneDNN | 6.2 | 7.0 | 8.1 | 9.7 | 20.6 | 65 |
    """
    faster = _untimed(x, weight_oi)
    if faster is None:
        return plain_linear(x, weight_oi, bias)
    return _product(x, weight_oi, bias, plain_linear, False, faster)


def untimed_conv1d(x: Tensor, weight_io: Tensor, bias: Tensor | None = None) -> Tensor:
    """`untimed_linear` for transformers' ``Conv1D``."""
    faster = _untimed(x, weight_io)
    if faster is None:
        return plain_conv1d(x, weight_io, bias)
    return _product(x, weight_io, bias, plain_conv1d, True, faster)


def _untimed(x: Tensor, weight: Tensor) -> FasterRows | None:
    """Return the untimed default for a product; ``None`` for torch."""
    if torch.compiler.is_compiling():
        return None
    # Decoding calls this a hundred times per token, so the cheapest check comes first.
    few = x.numel() < MOST_TIMED * x.shape[-1]
    if few and weight.numel() < FEWEST_WEIGHTS:
        return None
    if not x.is_cpu or x.dtype is not torch.float32 or weight.dim() != 2 or min(weight.shape) < FEWEST_SIDE:
        return None
    rows = x.numel() // x.shape[-1]
    if not few and rows * weight.numel() >= LARGE * torch.get_num_threads() and _has_amx():
        return _UNTIMED
    return _UNTIMED_AMD if _prefers_onednn() else None


def _has_amx() -> bool:
    return split_product.unavailable_reason() is None


@cache
def _prefers_onednn() -> bool:
    """Return whether this is an AMD processor on Linux, with oneDNN's linear operation in this build of torch."""
    try:
        of_amd = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return of_amd and has_onednn()


@cache
def unavailable_reason() -> str | None:
    """Return why all products are left to torch, or ``None``. Compile the library unless it is cached."""
    return build.unavailable_reason(_library)


def ways_of(weight: Tensor, bias: Tensor | None, io: bool) -> tuple[str, ...] | str:
    """Return the implementations for products with this weight, or why there are none. Compile on first use.

    Args:
        io: whether the weight is ``[in, out]``.
    """
    dtype = weight.dtype
    if dtype not in _KINDS:
        return f"torch computes products of {dtype}"
    if not _fits(weight, dtype) or (bias is not None and not _fits(bias, dtype)):
        return "weight or bias is no plain, contiguous CPU tensor of the layer's dtype"
    if weight.shape[io] < FEWEST_OUTPUTS:
        return f"fewer than {FEWEST_OUTPUTS} outputs"
    if dtype is not torch.float32 and _is_native(dtype):
        return f"the processor has instructions for {dtype}, which torch uses"
    missing = unavailable_reason()
    ways = (CPP,) * (missing is None)
    if dtype is torch.float32:
        ways += (ONEDNN,) * has_onednn() + (SPLIT,) * (split_product.unavailable_reason() is None)
    return ways or str(missing)


def most_rows(dtype: torch.dtype, io: bool) -> int:
    """Return the maximum number of rows of a product in C++."""
    return MOST_ROWS_HALF if dtype is not torch.float32 else MOST_ROWS_IO if io else MOST_ROWS


_Plain = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def _product(
    x: Tensor, weight: Tensor, bias: Tensor | None, plain: _Plain, io: bool, faster: FasterRows | None
) -> Tensor:
    # Decoding calls this a hundred times per token, so the cheapest checks come first.
    if torch.compiler.is_compiling() or not x.is_cpu or _is_watched() or not _is_usual(x, weight, bias):
        return plain(x, weight, bias)
    if torch.is_grad_enabled():
        trained = None if faster is None else _trained_way(x, weight, faster, io)
        return plain(x, weight, bias) if trained is None else trained_product(x, weight, bias, io, trained)
    inner, outer = weight.shape if io else weight.shape[::-1]
    rows = x.numel() // inner if inner else 0
    half = x.dtype is not torch.float32
    if x.shape[-1] != inner or outer < FEWEST_OUTPUTS or not rows or (half and _is_native(x.dtype)):
        return plain(x, weight, bias)
    few = rows <= most_rows(x.dtype, io)
    way = (CPP if few else None) if faster is None else faster.way(rows, x.dtype)
    if way in MANY:
        return product_by(way, x, weight.t() if io else weight, bias)
    if unavailable_reason():
        return plain(x, weight, bias)
    if way == CPP:
        return _of_few_rows(x, weight, bias, rows, inner, outer, io)
    return _widened(x, weight, bias, plain, io) if half and not few else plain(x, weight, bias)


@cache
def has_onednn() -> bool:
    """Return whether this build of torch has oneDNN's linear operation. `torch.compile` uses it as well."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _trained_way(x: Tensor, weight: Tensor, faster: FasterRows, io: bool) -> str | None:
    """Return the implementation for a product of many rows and its gradients, or ``None`` for torch."""
    inner = weight.shape[1 - io]
    rows = x.numel() // inner if inner and x.shape[-1] == inner else 0
    way = faster.way(rows, x.dtype)
    return None if rows < MOST_TIMED or way not in MANY else way


def trained_product(x: Tensor, weight: Tensor, bias: Tensor | None, io: bool, way: str) -> Tensor:
    """Compute a product with gradients by one of the implementations `MANY`. Function modes of torch can replace it."""
    if has_torch_function((x,)):
        return handle_torch_function(trained_product, (x,), x, weight, bias, io, way)
    return _TrainedProduct.apply(x, weight, bias, io, way)


class _TrainedProduct(torch.autograd.Function):
    """A product and its gradients by one of the implementations `MANY`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, io: bool, way: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.io, ctx.way = io, way
        out_no = product_by(way, x.flatten(0, -2), weight.t() if io else weight, bias)
        # no autograd view: the all-reduce over ranks changes the output in place
        made: Tensor = torch.ops.aten._unsafe_view(out_no, (*x.shape[:-1], out_no.shape[-1]))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        product = plain_linear if torch.is_grad_enabled() else partial(product_by, ctx.way)  # for double backward
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = product(grad, weight if ctx.io else weight.t())
        grad_no = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            x_ni = x.flatten(0, -2)
            of_weight = product(x_ni.t(), grad_no.t()) if ctx.io else product(grad_no.t(), x_ni.t())
        return of_x, of_weight, grad_no.sum(0) if ctx.needs_input_grad[2] else None, None, None


def by_onednn(x: Tensor, weight_oi: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` in float32 without gradients. The weight may have any strides."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight_oi, bias, "none", [], "")
    return made


def by_split(x: Tensor, weight_oi: Tensor, bias: Tensor | None = None) -> Tensor:
    """`by_onednn` with `split_product` if it takes these matrices, else with torch."""
    x_ni = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if not split_product.fits(x_ni, weight_oi):
        return plain_linear(x, weight_oi, bias)
    return split_product.product(x_ni, weight_oi, bias).view(*x.shape[:-1], len(weight_oi))


def product_by(way: str, x: Tensor, weight_oi: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` by one of the implementations `MANY`, without gradients. The weight may have any strides."""
    return by_split(x, weight_oi, bias) if way == SPLIT else by_onednn(x, weight_oi, bias)


def multiply_into(out: Tensor, left: Tensor, right: Tensor, way: str | None = None, *, add: bool = False) -> Tensor:
    """Write ``left @ right`` to ``out`` or add it, without gradients. Use `SPLIT` if given and possible, else torch."""
    if way == SPLIT and split_product.fits(left, right.T):
        return split_product.product(left, right.T, out_MN=out, add=add)
    return out.addmm_(left, right) if add else torch.mm(left, right, out=out)


def _is_watched() -> bool:
    """Return whether torch's operations are intercepted: by ``torch.func``, forward-mode AD or dispatch modes."""
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transformed or torch._C._len_torch_dispatch_stack() > 0


def _is_usual(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether these are plain, dense tensors of one dtype, outside of autocast."""
    dtype = x.dtype
    if type(x) is not Tensor or dtype not in _KINDS or torch.is_autocast_enabled("cpu"):
        return False
    return _fits(weight, dtype) and (bias is None or _fits(bias, dtype))


def _fits(parameter: Tensor, dtype: torch.dtype) -> bool:
    kind = type(parameter)
    # tensor subclasses with their values in their storage, such as shards, declare it by this attribute
    plain = kind is nn.Parameter or kind is Tensor or getattr(kind, "has_plain_storage", False)
    return plain and parameter.dtype is dtype and parameter.is_cpu and parameter.is_contiguous()


def _of_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, inner: int, outer: int, io: bool) -> Tensor:
    x, out = x.contiguous(), x.new_empty((*x.shape[:-1], outer))
    pointers = x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr()
    run(pointers, rows, inner, outer, _KINDS[x.dtype], io)
    return out


def run(
    pointers: tuple[int, int, int, int], rows: int, inner: int, outer: int, kind: int, io: bool, scale: int = 0
) -> None:
    """Call the compiled function with a suitable number of threads. Its C++ source describes the arguments."""
    function, threaded = _library()
    threads = min(torch.get_num_threads(), 1 + inner * outer // WEIGHTS_PER_THREAD) if threaded else 1
    function(_ARGUMENTS(*pointers, rows, inner, outer, kind, io, threads, scale))


def _widened(x: Tensor, weight: Tensor, bias: Tensor | None, plain: _Plain, io: bool) -> Tensor:
    """Compute the product in float32, converting a part of the weights at a time."""
    dim = int(io)
    parts = weight.split(max(1, WIDENED // weight.shape[1 - dim]), dim)
    wide = x.float()
    out = torch.cat([plain(wide, part.float(), None) for part in parts], -1)
    return (out if bias is None else out.add_(bias)).to(x.dtype)


@cache
def _is_native(dtype: torch.dtype) -> bool:
    """Return whether oneDNN, which computes torch's 16-bit products, has 16-bit instructions on this processor."""
    kind = "bf16" if dtype == torch.bfloat16 else "fp16"
    return bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{kind}_supported")())


@cache
def _library() -> tuple[Callable[[bytes], None], bool]:
    """Return the compiled function, and whether it can use several threads."""
    library = build.load("linear.cpp")
    library.oslo_linear.argtypes, library.oslo_linear.restype = [ctypes.c_char_p], None
    return library.oslo_linear, bool(library.oslo_linear_threads())
