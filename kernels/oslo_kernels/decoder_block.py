"""A decoder block for one token per row on a CPU, in two calls: one before and one after the update of the cache.

Layer by layer, a token costs a thousand small calls of torch, which take as long as reading a hundred million weights
in 8 bits. The two calls compute the norms, products, rotary positions, attention, activation and residuals of a block
one after another in C++, in float32, and all-reduce over the ranks of one host through shared memory. The code is
compiled on first use. `unavailable_reason` returns the reason if it cannot be compiled.

Legend:
    B: rows, of one token each.
    N: the width of the hidden states.
    H: heads of this rank.
    G: its key-value heads.
    L: keys.
    D: size of a head.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from oslo_kernels import build, decode_attention, linear, narrow_linear
from oslo_kernels.shared_memory import SharedMemory

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
"""The activations of the MLP and their numbers in the C++ source."""
_BLOCK = struct.Struct("2q2dq" * 4 + "7q" * 7 + "6q").pack
_BEGIN, _FINISH = struct.Struct("11q").pack, struct.Struct("39qd").pack


@dataclass(frozen=True)
class NormWeights:
    """A norm of rows: ``LayerNorm``, or a root-mean-square norm with ``offset`` added to the weight."""

    weight: Tensor
    bias: Tensor | None
    eps: float
    offset: float
    is_layer_norm: bool


@dataclass(frozen=True)
class LinearWeights:
    """A linear layer.

    Attributes:
        weight: ``[out, in]``; in float32 also ``[in, out]``, for ``io``; in bfloat16; or in int8, with ``scale``.
    """

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None = None
    io: bool = False

    @property
    def kind(self) -> int:
        """The number of the weight's dtype in the C++ source."""
        return {torch.float32: 0, torch.bfloat16: 3, torch.int8: 4}[self.weight.dtype]

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of outputs and inputs."""
        first, second = self.weight.shape
        return (second, first) if self.io else (first, second)


@dataclass(frozen=True)
class Block:
    """The tensors of a block.

    Attributes:
        norms: before the attention and before the MLP.
        head_norms: of queries and of keys, or none.
        into: one layer to queries, keys and values, or one to each.
        mlp_into: one layer, or the layers to the gate and to the gated values.
        heads, groups, width: H, G and D.
        activation: one of `ACTIVATIONS`.
        sums: whether the outputs of ``out`` and ``mlp_out`` are all-reduced over the ranks before the bias is added.
    """

    norms: tuple[NormWeights, NormWeights]
    head_norms: tuple[NormWeights, NormWeights] | None
    into: Sequence[LinearWeights]
    out: LinearWeights
    mlp_into: Sequence[LinearWeights]
    mlp_out: LinearWeights
    heads: int
    groups: int
    width: int
    activation: str
    sums: bool

    def is_supported(self) -> bool:
        """Return whether the shapes of the tensors agree and the kernel supports this block."""
        hidden, (heads, groups, width) = self.norms[0].weight.numel(), (self.heads, self.groups, self.width)
        if not groups or heads % groups or min(min(layer.shape) for layer in self.layers()) < linear.FEWEST_OUTPUTS:
            return False
        states = [heads * width, groups * width, groups * width]
        inner = self.mlp_out.shape[1]
        shapes = [(outer, hidden) for outer in (states if len(self.into) == 3 else [sum(states)])]
        shapes += [(hidden, heads * width), *[(inner, hidden)] * len(self.mlp_into), (hidden, inner)]
        together = ({(layer.kind, layer.io) for layer in layers} for layers in (self.into, self.mlp_into))
        return [layer.shape for layer in self.layers()] == shapes and all(len(kinds) == 1 for kinds in together)

    @cached_property
    def most_rows(self) -> int:
        """Return the maximum number of rows for products with all of these weights in C++."""
        return min(
            narrow_linear.MOST_ROWS if layer.kind else linear.most_rows(torch.float32, layer.io)
            for layer in self.layers()
        )

    def layers(self) -> list[LinearWeights]:
        """The linear layers."""
        return [*self.into, self.out, *self.mlp_into, self.mlp_out]

    def packed(self) -> bytes:
        """Return the C++ struct of the block, with the current addresses of the tensors."""
        values: list[float] = []
        for norm in (*self.norms, *(self.head_norms or (None, None))):
            if norm is None:
                values += (0, 0, 0.0, 0.0, 0)
            else:
                values += (norm.weight.data_ptr(), _address(norm.bias), norm.eps, norm.offset, norm.is_layer_norm)
        none = None
        into, mlp_into = (*self.into, none, none)[:3], (*self.mlp_into, none)[:2]
        for layer in (*into, self.out, *mlp_into, self.mlp_out):
            if layer is None:
                values += (0,) * 7
            else:
                addresses = layer.weight.data_ptr(), _address(layer.bias), _address(layer.scale)
                values += (*addresses, *reversed(layer.shape), layer.kind, layer.io)
        hidden = self.norms[0].weight.numel()
        activation = ACTIVATIONS[self.activation]
        return _BLOCK(*values, hidden, self.heads, self.groups, self.width, activation, self.sums)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def unavailable_reason() -> str | None:
    """Return why decoder blocks are unavailable, or ``None``. Compile the library unless it is cached."""
    return build.unavailable_reason(_library)


def begin(block: bytes, x_B1N: Tensor, states: Tensor, cos: Tensor | None, sin: Tensor | None) -> None:
    """Write queries, keys and values, with norms of heads and positions, into ``states``, ``[B, (H + 2 G) * D]``.

    Args:
        block: the result of `Block.packed`, valid while its tensors keep their addresses. All tensors are dense, in
            float32.
        cos, sin: ``[B or 1, 1, turned]``. The elements of a head after the first ``turned`` stay unchanged.
    """
    first, _, threaded = _library()
    turned = 0 if cos is None else cos.shape[-1]
    first(
        block,
        _BEGIN(
            *(x_B1N.data_ptr(), states.data_ptr(), 0, 0, _address(cos), _address(sin), len(states), turned),
            *(turned if cos is not None and len(cos) > 1 else 0, _threads(threaded), linear.WEIGHTS_PER_THREAD),
        ),
    )


def finish(
    block: bytes,
    x_B1N: Tensor,
    attention: tuple[float, ...] | Tensor,
    memory: SharedMemory | None,
    all_reduce: Callable[[Tensor], object],
) -> Tensor:
    """Compute attention, its output projection, the MLP and both residuals, ``[B, 1, N]``.

    Args:
        attention: the result of `decode_attention.arguments`, or the attention output, ``[B, 1, H, D]``, dense.
        memory: the shared memory of the ranks for the all-reduce of outputs, if there is one.
        all_reduce: a function that sums a tensor over the ranks in place, for ranks without shared memory.
    """
    _, second, threaded = _library()
    part, out = x_B1N.new_empty((2, *x_B1N.shape)), torch.empty_like(x_B1N)
    phase = 0
    if isinstance(attention, Tensor):
        attention, phase = decode_attention.result_only(attention), 1
    reduce, region = (0, 0) if memory is None else memory.direct()
    step = _FINISH(
        *(x_B1N.data_ptr(), 0, part.data_ptr(), out.data_ptr(), 0, 0, len(x_B1N), 0, 0),
        *(_threads(threaded), linear.WEIGHTS_PER_THREAD, reduce, region),
        *attention,
    )
    while waits := second(block, step, phase):
        phase, code = waits >> 32, waits & 0xFFFFFFFF
        if code == _SUM or memory is None:
            all_reduce(part[0])
        else:
            memory.resume(part[0], code - (1 << 32) if code >> 31 else code)
    return out


_SUM = 1 << 29
"""The return code of the C++ function if it cannot sum over the ranks."""


def _threads(threaded: bool) -> int:
    return torch.get_num_threads() if threaded else 1


@cache
def _library() -> tuple[Callable[[bytes, bytes], None], Callable[[bytes, bytes, int], int], bool]:
    """Return the two functions, and whether they can use several threads."""
    library = build.load("decoder_block.cpp")
    first, second = library.oslo_block_begin, library.oslo_block_finish
    first.argtypes, first.restype = [ctypes.c_char_p, ctypes.c_char_p], None
    second.argtypes, second.restype = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64
    return first, second, bool(library.oslo_block_threads())
