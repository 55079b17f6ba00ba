"""Decoder blocks on a CPU that compute single tokens in C++, one per row, without gradients.

`oslo_kernels.decoder_block` computes a block in two calls, with the update of the cache in between. A block uses it for
the numbers of rows for which `block_timing` has found it faster. In all other cases a block computes as before: with
gradients, in other dtypes, for more tokens, with hooks on inner layers, and with replaced inner layers.

Legend:
    B: rows, of one token each.
    N: the width of the hidden states.
    H: heads of this rank.
    G: its key-value heads.
    L: keys.
    D: size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_of_torch

from oslo_kernels import decode_attention, decoder_block
from oslo_kernels.decoder_block import Block
from oslo_models.cache_argument import cache_name, named_arguments, take_cache, update_cache
from oslo_models.distributed.collectives import all_reduce
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.distributed.shared_memory import shared_memory_of
from oslo_models.fusion.attention_parts import PARTS, attention_by_parts
from oslo_models.fusion.decode_attention import DECODING
from oslo_models.fusion.decoder_layers import GPT2, BlockForm, BlockLayers, block_of
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION


class BlockDecoding:
    """Compute one block of a model in C++ where possible.

    Args:
        form: the names of the block's layers.
        activation: the activation of the MLP, one of `oslo_kernels.decoder_block.ACTIVATIONS`.
        faster: the numbers of rows for which C++ is faster, and the number of threads of this measurement. ``None``:
            all that C++ supports.
    """

    def __init__(self, form: BlockForm, activation: str, faster: tuple[frozenset[int], int] | None = None) -> None:
        self.form, self._activation, self.faster = form, activation, faster
        self._layers: BlockLayers | None = None
        self._addresses: list[int] = []
        self._block: Block | None = None
        self._packed = b""
        self._sums: Axis | None = None

    @property
    def has_positions(self) -> bool:
        """Return whether the block takes cosines and sines of the positions, used or not."""
        return self.form is not GPT2

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockDecoding:
        return BlockDecoding(*self.__reduce__()[1])

    def __reduce__(self) -> Any:
        return BlockDecoding, (self.form, self._activation, self.faster)

    def __call__(
        self,
        block: nn.Module,
        hidden_B1N: Tensor,
        mask: Tensor | None,
        cached: Any,
        tables: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor | None:
        """Return the block's output, or ``None`` if C++ does not support the call.

        Args:
            cached: the cache.
            tables: cosines and sines of the positions.
        """
        if torch.is_grad_enabled() or cached is None or block.training:
            return None
        if type(hidden_B1N) is not Tensor or not _is_plain(hidden_B1N) or hidden_B1N.shape[1] != 1:
            return None
        if torch.is_autocast_enabled("cpu") or _global_hooks():
            return None
        rows = len(hidden_B1N)
        if self.faster is not None and (rows not in self.faster[0] or torch.get_num_threads() != self.faster[1]):
            return None
        with without_override():
            tables = tables if self.form.rotary else None
            made = self.block(block)
            if made is None or rows > made.most_rows or (tables is not None and not _fit(tables, rows, made.width)):
                return None
            return self._run(made, hidden_B1N, mask, cached, tables)

    def _run(
        self, block: Block, x_B1N: Tensor, mask: Tensor | None, cached: Any, tables: tuple[Tensor, Tensor] | None
    ) -> Tensor:
        assert self._layers is not None
        attention, sums = self._layers.attention, self._sums
        rows, heads, groups, width = len(x_B1N), block.heads, block.groups, block.width
        columns = (heads + 2 * groups) * width
        states = x_B1N.new_empty(rows, columns)
        decoder_block.begin(self._packed, x_B1N, states, *(tables or (None, None)))
        query, key, value = (
            states.as_strided((rows, count, 1, width), (columns, width, columns, 1), first * width)
            for count, first in ((heads, 0), (groups, heads), (groups, heads + groups))
        )
        key, value = update_cache(cached, key, value, attention.layer_idx, {})
        given: Any
        if isinstance(key, Tensor) and decode_attention.computes(query, key, value, (mask,)):
            attended = x_B1N.new_empty(rows, 1, heads, width)
            shown, added = (mask, None) if mask is not None and mask.dtype is torch.bool else (None, mask)
            given = decode_attention.arguments(query, key, value, attention.scaling, shown, added, attended)
        else:  # such as a cache in another dtype, or in parts
            attended, _ = attention_by_parts(DECODING, attention, query, key, value, mask, scaling=attention.scaling)
            given = attended.contiguous()
        memory = None if sums is None else shared_memory_of(sums)
        return decoder_block.finish(self._packed, x_B1N, given, memory, lambda part: all_reduce(sums, part))  # type: ignore[arg-type]

    def block(self, module: nn.Module) -> Block | None:
        """Return the tensors of a block, or ``None`` if C++ does not support its single tokens."""
        layers = self._layers
        if layers is None or not layers.are_in_place():
            layers = self._layers = BlockLayers(module, self.form)
            self._addresses = []
        if layers.are_seen() or not layers.is_current or layers.attention.config._attn_implementation not in _SUPPORTED:
            return None
        addresses = layers.addresses()
        if addresses != self._addresses:
            made = self._block = block_of(layers, self._activation)
            self._addresses, self._packed = addresses, b"" if made is None else made.packed()
            self._sums = layers.out.tp if made is not None and made.sums else None
        return self._block


_SUPPORTED = (*TORCH_ATTENTION, DECODING, *(PARTS + own for own in TORCH_ATTENTION))


def _global_hooks() -> bool:
    return bool(module_of_torch._global_forward_hooks or module_of_torch._global_forward_pre_hooks)


def _is_plain(x: Tensor) -> bool:
    return x.dtype is torch.float32 and x.is_cpu and x.dim() == 3 and x.is_contiguous()


def _fit(tables: tuple[Tensor, Tensor], rows: int, width: int) -> bool:
    cos, sin = tables
    if cos.shape != sin.shape or not _is_plain(cos) or not _is_plain(sin):
        return False
    return cos.shape[0] in (1, rows) and cos.shape[1] == 1 and cos.shape[2] % 2 == 0 and cos.shape[2] <= width


class DecodingBlock(nn.Module):
    """A mixin before the block of GPT-2, or of Llama and its copies.

    Attributes:
        decoding: the computation of single tokens.
    """

    decoding: BlockDecoding

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            given = named_arguments(super().forward, args, kwargs)
            cached, tables = take_cache(super().forward, given), given.pop("position_embeddings", None)
            if (tables is not None or not self.decoding.has_positions) and not _asks_more(given):
                found = self.decoding(self, hidden_states, given.get("attention_mask"), cached, tables)
                if found is not None:
                    return found
        return super().forward(hidden_states, *args, **kwargs)

    def cache_name(self) -> str:
        """Return the name of the argument that takes the cache."""
        return cache_name(super().forward)


_WITHOUT_EFFECT = frozenset(("attention_mask", "position_ids", "use_cache", "cache_position"))


def _asks_more(kwargs: dict[str, Any]) -> bool:
    """Return whether arguments of a block change the results or the computation of its attention."""
    return any(
        value is not None and value is not False for name, value in kwargs.items() if name not in _WITHOUT_EFFECT
    )
