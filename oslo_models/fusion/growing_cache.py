"""A key-value cache that grows in place. The cache of transformers copies all keys and values for each token.

The time of that copy grows with the text. When keys and values have the same size in bytes as the weights, the copy
takes longer than the products of a step.

Legend:
    B: rows.
    H: key-value heads of this rank.
    L: positions.
    D: size of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, EncoderDecoderCache

from oslo_models.contracts import holds

_LAYER = "transformers.cache_utils.DynamicLayer"
LEAST_SPARE = 64
"""The minimum number of positions to allocate ahead. Longer caches allocate an eighth of their length ahead."""


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` with spare memory. Its keys and values, [B, H, L, D], are views of this memory."""

    keys: Any
    values: Any
    _views: tuple[Tensor, Tensor] | None = None
    _memory: tuple[Tensor, Tensor]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append positions. Return all keys and values."""
        if torch.is_grad_enabled():  # a backward pass may need the tensors returned before, unchanged
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        stop = length + key_states.shape[-2]
        views = self._views
        is_own = views is not None and self.keys is views[0] and self.values is views[1]
        # memory from inference mode is read-only outside of it
        is_own = is_own and (torch.is_inference_mode_enabled() or not self._memory[0].is_inference())
        if not is_own or stop > self._memory[0].shape[-2]:
            self._allocate(key_states, value_states, length, stop)
        keys, values = self._memory
        keys.narrow(-2, length, stop - length).copy_(key_states)
        values.narrow(-2, length, stop - length).copy_(value_states)
        self.keys, self.values = self._views = keys.narrow(-2, 0, stop), values.narrow(-2, 0, stop)
        return self._views

    def _allocate(self, key_states: Tensor, value_states: Tensor, length: int, stop: int) -> None:
        """Allocate memory and copy the current keys and values, which other cache methods may have replaced."""
        spare = stop + max(LEAST_SPARE, stop // 8)
        made = []
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            memory = states.new_empty(*states.shape[:-2], spare, states.shape[-1])
            if length:
                memory[..., :length, :] = held
            made.append(memory)
        self._memory = (made[0], made[1])

    def reset(self) -> None:
        """Drop all positions."""
        super().reset()
        self._views = None


def let_grow(cache: Any) -> None:
    """Let the empty layers of a transformers cache grow in place if they keep all positions."""
    if not all(holds(f"{_LAYER}.{name}", "the cache is copied for each token") for name in ("update", "reset")):
        return
    cache = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if type(cache) is DynamicCache and not cache.offloading:
        cache.layers = [
            GrowingLayer() if type(layer) is DynamicLayer and not layer.is_initialized else layer
            for layer in cache.layers
        ]
