"""States of rows in the running batch: the convolution and recurrent states of state-space, linear-attention and
convolution blocks, with an entry for each slot.

A state has no columns. It covers all tokens of its row that were computed, so it can be copied and continued, and never
cut. With drafted tokens, the states before each of them are kept for a step, see `token_states`. Other layers of the
cache keep keys and values, see `slot_cache`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from oslo_models.pipeline.sharded_model import ShardedModel

BLOCKS = frozenset(("linear_attention", "conv", "hybrid", "hybrid_sliding"))
"""Kinds of blocks (``layer_types``) with states. Hybrid blocks have keys and values, too."""
INDEXED = frozenset(("indexed_attention", "minimax_m3_sparse", "deepseek_sparse_attention"))
"""Kinds of blocks with keys of an indexer; the last one is a former name of the first."""
XLSTM_STATES = 3
"""States of a block of xLSTM, which keeps them in a cache of its own; see `own_caches`."""
_STATES = ("conv_states", "recurrent_states")


def has_states(config: Any) -> bool:
    """Return whether some blocks of a decoder have states."""
    if config.model_type == "xlstm":
        return True
    return not BLOCKS.isdisjoint(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def has_index(config: Any) -> bool:
    """Return whether some blocks of a decoder keep keys of an indexer beside the keys of attention."""
    return not INDEXED.isdisjoint(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())


def layers_with_states(model: ShardedModel) -> list[Any]:
    """Return empty layers of transformers' cache for the blocks of this stage; an empty list for models without states.

    transformers reads states from layers that exist before the first forward, unlike keys and values.
    """
    if not has_states(model.config):
        return []
    own = None if model.stage is None else model.stage.cache_layers
    if model.config.model_type == "recurrent_gemma":  # one stage; both states are given as a whole, see `own_caches`
        kinds = model.config.layer_types
        return [LinearAttentionLayer(2) if kind in BLOCKS else DynamicLayer() for kind in kinds]
    if model.config.model_type == "xlstm":
        blocks = model.config.num_hidden_layers if own is None else own.stop - own.start
        return [LinearAttentionLayer(XLSTM_STATES) for _ in range(blocks)]
    cache = DynamicCache(config=model.config)
    if own is not None:
        own.restrict(cache)
    config: Any = model.config.get_text_config(decoder=True)
    if config.model_type == "inkling2_loop_text":  # else its forward copies layers
        looped = cache.layers[config.loop_layer_index_start : config.loop_layer_index_end]
        return [*cache.layers, *looped * (config.loop_num_passes - 1)]
    return cache.layers


def number_of_states(layer: Any) -> int:
    """Return the number of states of each kind in a layer of transformers' cache; 0 without states."""
    return layer.number_of_states if isinstance(layer, LinearAttentionCacheLayerMixin) else 0


class StateLayer(LinearAttentionLayer):
    """States [B, ...] of one layer, with an entry for each slot.

    transformers reads and writes the entries of the rows in place. In a forward, ``conv_states`` and
    ``recurrent_states`` are views of the first slots.

    Args:
        cache: the `SlotCache`.
        count: number of states of each kind.
    """

    is_compileable = False

    def __init__(self, cache: Any, count: int) -> None:
        super().__init__(number_of_states=count)
        self._slots, self.is_initialized = cache, False
        self._entries: dict[tuple[str, int], Tensor] = {}
        self._before_tokens: list[dict[tuple[str, int], Tensor]] = []  # states of the rows, of a step with drafts
        self._before_steps: list[dict[tuple[str, int], Tensor]] = []  # of steps without drafts

    @property
    def held(self) -> list[Tensor]:
        """The allocated tensors."""
        return [*self._entries.values()]

    def lazy_initialization(self, **given: Any) -> None:
        """Allocate an entry of a state for each slot.

        Args:
            given: ``conv_states`` or ``recurrent_states`` of some rows, and further arguments of transformers.
        """
        super().lazy_initialization(**given)
        index = given.get("state_idx", 0)
        for name in _STATES:
            if given.get(name) is not None:
                state = getattr(self, name)[index]
                self._entries[name, index] = state.new_zeros(self._slots.rows, *state.shape[1:])
        self.is_initialized = True
        self._show_rows()

    def match(self, like: Any) -> None:
        """Allocate memory for the states of another layer, where shapes or dtypes differ."""
        for (name, index), other in like._entries.items():
            own = self._entries.get((name, index))
            if own is None or own.shape[1:] != other.shape[1:] or own.dtype != other.dtype:
                self.lazy_initialization(**{name: other[:1], "state_idx": index})

    def show(self, continues: bool) -> None:
        """Prepare a forward of all rows.

        Args:
            continues: the rows continue from their states. Otherwise they begin, and the entries are overwritten.
        """
        self._show_rows()
        self.has_previous_state = dict.fromkeys(range(self.number_of_states), continues)

    def _show_rows(self) -> None:
        for (name, index), entries in self._entries.items():
            getattr(self, name)[index] = entries[: len(self._slots.lengths)]

    def remember_token(self) -> None:
        """Keep the present states of the rows until `settle`."""
        self._before_tokens.append(self._present())

    def remember_step(self) -> None:
        """Keep the present states of the rows until `cut`. Steps that rows take meanwhile are settled as usual."""
        self._before_steps.append(self._present())

    def settle(self, counts: Sequence[int]) -> None:
        """Return to the states after the first ``counts[slot]`` tokens of each row in a step with drafts."""
        self._return_to(self._before_tokens, counts)

    def cut(self, counts: Sequence[int]) -> None:
        """Return to the states before the last ``counts[slot]`` steps of each row that `remember_step` has seen."""
        steps = self._before_steps
        if steps:  # else, other layers are cut, of MTP heads
            self._return_to(steps, [len(steps) - count for count in counts])

    def forget(self) -> None:
        """Drop the remembered states."""
        self._before_tokens.clear()
        self._before_steps.clear()

    def _present(self) -> dict[tuple[str, int], Tensor]:
        rows = len(self._slots.lengths)
        return {key: entries[:rows].clone() for key, entries in self._entries.items()}

    def _return_to(self, before: list[dict[tuple[str, int], Tensor]], counts: Sequence[int]) -> None:
        """Return to the states after ``counts[slot]`` tokens of each row. Drop the remembered states."""
        for slot, count in enumerate(counts):
            if count < len(before):
                for key, states in before[count].items():
                    self._entries[key][slot] = states[slot]
        before.clear()

    # As in `slot_cache`. Columns mean nothing here.

    def draw_back(self, lags_N2: Tensor, count: int) -> None: ...

    def relocate(self, columns: int, at: int) -> None:
        """Grow to the slots of the cache."""
        for key, entries in self._entries.items():
            if len(entries) != self._slots.rows:
                self._entries[key] = entries.new_zeros(self._slots.rows, *entries.shape[1:])
                self._entries[key][: len(entries)] = entries

    def move(self, slot: int, source: int, start: int, stop: int, exchange: bool = False) -> None:
        """Copy the states of slot ``source`` to ``slot``, or swap them."""
        for entries in self._entries.values():
            lost = entries[slot].clone() if exchange else None
            entries[slot] = entries[source]
            if lost is not None:
                entries[source] = lost

    def fork(self, slot: int, first: int, count: int, stop: int) -> None:
        """Copy the states of a slot to ``count`` slots from ``first``."""
        for entries in self._entries.values():
            entries[first : first + count] = entries[slot]

    def copy(self, slot: int, source: Any, row: int, stop: int, source_stop: int, length: int) -> None:
        """Copy the states of a row of another layer into a slot."""
        for key, entries in source._entries.items():
            self._entries[key][slot] = entries[row]
