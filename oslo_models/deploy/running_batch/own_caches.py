"""Slots of the running batch for models with a cache class of their own: MiniMax, xLSTM and encoder-decoders."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from oslo_models.cache_argument import NAMES
from oslo_models.deploy.running_batch.slot_cache import SlotCache


def slots_of(config: Any) -> type[SlotCache]:
    """Return the slots of a model."""
    if config.is_encoder_decoder:
        return CrossSlots
    if config.model_type == "minimax":
        return _minimax_slots()
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

    Attributes:
        cross: keys and values of cross-attention, with a slot for each row. Its rows are as long as their encoder
            prompts, and right-aligned, too.
    """

    def __init__(self, rows: int, length: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(rows, length, *args, **kwargs)
        self.cross = SlotCache(rows, length)

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

    def join(self, cache: EncoderDecoderCache, row: int, length: int) -> None:
        """Copy a row with one decoder token from another cache into the slot after the last row.

        Args:
            length: number of its encoder positions, which are the first ones in the cache.
        """
        self.append(cache.self_attention_cache.layers, row, 1, 1)
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
