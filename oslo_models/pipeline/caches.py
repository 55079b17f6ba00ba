"""Restricts the caches of ``generate`` to the layers of a pipeline stage, numbered from zero."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from transformers.cache_utils import DynamicLayer, EncoderDecoderCache, StaticLayer


@dataclass(frozen=True)
class CacheLayers:
    """Layers of one stage in a cache for the full model.

    Attributes:
        start, stop: range of the local layers.
        total: number of layers of the full model.
        counting_layer: additional layer after the local layers that counts the positions, or ``None``. See `Stage`.
    """

    start: int
    stop: int
    total: int
    counting_layer: int | None

    def restrict(self, cache: Any) -> None:
        """Remove the layers of other stages from an empty cache, in place.

        For T5, transformers creates caches with the number of encoder layers. Layers of one kind are interchangeable.

        Raises:
            ValueError: the cache has layers of several kinds, and their number differs from the model's.
        """
        if isinstance(cache, EncoderDecoderCache):
            self.restrict(cache.self_attention_cache)
            self.restrict(cache.cross_attention_cache)
            return
        layers = getattr(cache, "layers", None)
        if not layers or getattr(cache, "_of_stage", None) == self:  # it grows as needed, or continues an earlier call
            return
        if len(layers) == self.total:
            own = list(layers[self.start : self.stop])
        elif len({type(layer) for layer in layers}) == 1:
            own = list(layers[: self.stop - self.start])
        else:
            raise ValueError(
                f"the cache has {len(layers)} layers and the model {self.total}: make it by "
                f"{type(cache).__name__}(config=model.config), or leave it out"
            )
        if self.counting_layer == len(own):
            own.append(_counting_layer(layers))
        cache.layers, cache._of_stage = own, self


def _counting_layer(layers: list[Any]) -> Any:
    """Return a layer that counts positions. It is static, with a fixed size, if the other layers are static."""
    kinds = (layer for layer in layers if isinstance(layer, StaticLayer))
    return copy.copy(next(kinds, None)) or DynamicLayer()
