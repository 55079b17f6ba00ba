"""Slots of the running batch for models that keep more than a cache of transformers: MiniMax, MiniMax-M3, xLSTM,
RecurrentGemma and encoder-decoders.

Legend:
    B: rows.
    H: heads.
    N: new positions of each row.
    L: positions of the longest row.
    C: columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from oslo_models.cache_argument import NAMES
from oslo_models.deploy.running_batch.prompt_sounds import most_positions, reads_sounds
from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.layers.function_overrides import override_attributes


def slots_of(config: Any) -> Callable[..., SlotCache]:
    """Return the class of the slots of a model."""
    if reads_sounds(config):
        return functools.partial(CrossSlots, encoded=most_positions(config))
    if config.is_encoder_decoder:
        return CrossSlots
    if config.model_type == "minimax":
        return _minimax_slots()
    if config.model_type in ("minimax_m3_vl", "minimax_m3_vl_text"):
        return BlockSlots
    if config.model_type == "recurrent_gemma":
        return GriffinSlots
    return XlstmSlots if config.model_type == "xlstm" else SlotCache


@functools.cache
def _minimax_slots() -> type[SlotCache]:
    """Return a subclass of transformers' cache of MiniMax, which its model insists on."""
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    class MiniMaxSlots(SlotCache, MiniMaxCache):
        """Slots with the states of lightning attention as recurrent states."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            SlotCache.__init__(self, *args, **kwargs)
            self.linear_cache: list[Tensor] = []  # the layers hold the states

        def get_linear_cache(self, layer_idx: int) -> Tensor | None:
            layer: Any = self.layers[layer_idx]
            state: Tensor | None = layer.recurrent_states[0] if layer.has_previous_state[0] else None
            return state

        def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
            layer: Any = self.layers[layer_idx]
            layer.update_recurrent_state(linear_cache)

    return MiniMaxSlots


class BlockSlots(SlotCache):
    """Slots for MiniMax-M3, whose indexers choose blocks of keys, counted from the first position of a row.

    In transformers, they are counted from the first column. So an indexer gets the keys of each row from its first
    position, and its choice is moved to the columns of the row.
    """

    _indexers: list[Any] | None = None

    @contextmanager
    def computing(self, model: Any) -> Iterator[None]:
        if self._indexers is None:  # a search through all modules
            self._indexers = [each for each in model.modules() if hasattr(each, "build_block_mask")]
        with ExitStack() as stack:
            for each in self._indexers:
                mask = functools.partial(self._mask_of_blocks, each.build_block_mask)
                stack.enter_context(override_attributes(each, {"build_block_mask": mask}))
            yield

    def _mask_of_blocks(
        self,
        own: Any,
        block_indices: Tensor,
        attention_mask: Tensor | None,
        key_length: int,
        dtype: torch.dtype,
        device: torch.device,
        position_ids: Tensor,
    ) -> Tensor:
        """Return the mask [B, H, N, C] of blocks and of the rows, added to the scores."""
        if min(self.lengths) == self.window:  # then columns are positions
            mask: Tensor = own(block_indices, attention_mask, key_length, dtype, device, position_ids)
            return mask
        assert attention_mask is not None, "rows of different lengths have a mask"
        new = block_indices.shape[2]
        chosen_BHNL = own(block_indices, None, max(self.lengths) + new, dtype, device, position_ids) == 0
        index = self.positions_of_columns(new).to(device)[:, None, None].expand(*chosen_BHNL.shape[:3], -1)
        shown = attention_mask if attention_mask.dtype is torch.bool else attention_mask == 0
        keep_BHNC = chosen_BHNL.gather(-1, index) & shown
        return torch.zeros(keep_BHNC.shape, dtype=dtype, device=device).masked_fill(~keep_BHNC, torch.finfo(dtype).min)


class GriffinSlots(SlotCache):
    """Slots with the states that RecurrentGemma keeps in its modules: of each convolution and recurrence."""

    _blocks: list[tuple[int, Any]] | None = None

    @contextmanager
    def computing(self, model: Any) -> Iterator[None]:
        if self._blocks is None:  # a search through all modules
            found = enumerate(model.base_model.layers)
            blocks = [(index, layer.temporal_block) for index, layer in found]
            self._blocks = [(index, block) for index, block in blocks if hasattr(block, "conv1d_state")]
        for index, block in self._blocks:
            states = self.layers[index].recurrent_states
            begins = not self.window  # the block then makes zeros
            block.conv1d_state, block.rg_lru.recurrent_states = (None, None) if begins else (states[0], states[1])
        yield
        for index, block in self._blocks:
            for number, state in enumerate((block.conv1d_state, block.rg_lru.recurrent_states)):
                self.layers[index].update_recurrent_state(state, number)
            block.conv1d_state = block.rg_lru.recurrent_states = None


class XlstmSlots(SlotCache):
    """Slots with the three states of each block of xLSTM."""

    @property
    def argument(self) -> Any:
        if not self.window:
            return None
        states = {
            index: tuple(layer.recurrent_states.values())
            for index, layer in enumerate(self.layers)
            if layer.is_initialized
        }
        return SimpleNamespace(rnn_state=states, seqlen_offset=self.window)

    def take(self, output: Any) -> None:
        cache = next(output[name] for name in NAMES if output.get(name) is not None)
        for layer, states in zip(self.layers, cache.rnn_state.values(), strict=False):
            for index, state in enumerate(states):
                layer.update_recurrent_state(state, index)


class CrossSlots(SlotCache):
    """Slots of an encoder-decoder.

    Args:
        encoded: maximum number of encoder positions of a row; ``None``: ``length``.

    Attributes:
        cross: keys and values of cross-attention, with a slot for each row. Its rows are as long as their encoder
            prompts, and right-aligned, too.
    """

    def __init__(self, rows: int, length: int, *args: Any, encoded: int | None = None, **kwargs: Any) -> None:
        super().__init__(rows, length, *args, **kwargs)
        self.cross = SlotCache(rows, encoded or length)

    @property
    def argument(self) -> EncoderDecoderCache:
        """A cache of transformers with the present rows. Cross-attention reads it and appends nothing."""
        cross, shown = self.cross, DynamicCache()
        for each in cross.layers:
            layer = DynamicLayer()
            layer.keys, layer.values = (held[: len(cross.lengths), :, cross.start : cross.stop] for held in each.held)
            layer.is_initialized = True
            shown.layers.append(layer)
        return EncoderDecoderCache(self, shown)

    @property
    def tensors(self) -> list[Tensor]:
        return [*super().tensors, *self.cross.tensors]

    def join(self, cache: EncoderDecoderCache, row: int, length: int, tokens: int = 1) -> None:
        """Copy a row from another cache into the slot after the last row.

        Args:
            length: number of its encoder positions, which are the first ones in the cache.
            tokens: number of its decoder positions.
        """
        self.append(cache.self_attention_cache.layers, row, tokens, tokens)
        self.cross.append(cache.cross_attention_cache.layers, row, length, length)

    def fork(self, slot: int, count: int) -> None:
        super().fork(slot, count)
        self.cross.fork(slot, count)

    def free(self, slot: int) -> None:
        super().free(slot)
        self.cross.free(slot)

    def clear(self) -> None:
        super().clear()
        self.cross.clear()

    def reserve(self, like: Any) -> None:
        super().reserve(like.self_attention_cache)
        self.cross.reserve(like.cross_attention_cache)
