"""Slots of the running batch for decoders with a cache class of their own: MiniMax and xLSTM."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from oslo_models.cache_argument import NAMES
from oslo_models.deploy.running_batch.slot_cache import SlotCache


def slots_of(model_type: str) -> type[SlotCache]:
    """Return the slots of a decoder type."""
    if model_type == "minimax":
        return _minimax_slots()
    return XlstmSlots if model_type == "xlstm" else SlotCache


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
