"""The cache of the running batch: slots for rows of different lengths, right-aligned at one column.

Blocks with states keep them in the same slots, see `slot_states`.

Legend:
    B: rows, or slots.
    N: rows that lag.
    H: key-value heads of this rank.
    L: columns, the positions of the longest row.
    D: size of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from oslo_models.deploy.running_batch.limits import LEAST_COLUMNS, columns
from oslo_models.deploy.running_batch.slot_states import StateLayer, number_of_states

Stored = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class SlotCache(Cache):
    """A transformers cache with slots: rows can join and leave at any step.

    The rows are right-aligned, as `generate` pads them. Row *i* occupies the ``lengths[i]`` columns before ``stop``.
    The columns before it are zeros, and an attention mask hides them. Every layer keeps all positions. Layers with
    sliding-window attention do so too: their mask hides the positions outside the window. Memory doubles as needed, up
    to the limits.

    With drafted tokens, some rows get more tokens in a step than others. A row with fewer tokens lags: there are empty
    columns between its last position and ``stop``, and the mask hides them too. Every forward writes after ``stop``, so
    the mask of its new positions is causal. `settle` moves the kept positions to their rows. When a row lags far, all
    rows are right-aligned again.

    The slots after the rows hold former rows until new rows need the slots. A former row keeps its columns.

    Args:
        rows: maximum number of rows.
        length: maximum number of positions of a row.
        keeps: keep former rows.
        is_static: steps of fixed shapes read the cache, see `static_step`. Then the columns after the rows are zeros,
            and the last column belongs to no row.
        stored: a function from new keys and values to the ones that the cache holds; ``None`` to hold them as they are.
        layers: of transformers' cache, for models with states; see `layers_with_states`.

    Attributes:
        lengths: of the rows, by slot.
        stop: the column after the last position of the foremost row, and of every row that does not lag.
        lags: number of columns between the last position of a row and ``stop``, by slot, of the rows that lag.
        kept: the first column and the end column (exclusive) of each former row, by slot.
        allocations: number of memory allocations. Compare it to detect that addresses in the cache have changed.
    """

    def __init__(
        self,
        rows: int,
        length: int,
        keeps: bool = False,
        is_static: bool = False,
        stored: Stored | None = None,
        layers: Sequence[Any] = (),
    ) -> None:
        if layers:
            Cache.__init__(self, layers=[_layer_like(self, each) for each in layers])
        else:
            Cache.__init__(self, layer_class_to_replicate=partial(_SlotLayer, self))
        self._has_states = any(map(number_of_states, layers))
        if layers:  # the blocks of MTP heads add layers
            self.layer_class_to_replicate = partial(_SlotLayer, self)
        self._keeps, self.is_static, self.stored, self.allocations = keeps, is_static, stored, 0
        self.kept: dict[int, tuple[int, int]] = {}
        self.most_rows, self.most_columns = rows, columns(length)
        self.lengths: list[int] = []
        self.lags: dict[int, int] = {}
        self.stop = self.rows = self.columns = 0

    @property
    def start(self) -> int:
        """The first column of any row."""
        return self.stop - self.window

    @property
    def window(self) -> int:
        """Number of columns from the first to the last position of any row."""
        if not self.lags:
            return max(self.lengths, default=0)
        return max(length + self.lags.get(slot, 0) for slot, length in enumerate(self.lengths))

    @property
    def tensors(self) -> list[Tensor]:
        """The allocated tensors."""
        return [held for layer in self.layers for held in layer.held]

    @property
    def bytes_held(self) -> int:
        return sum(held.nbytes for held in self.tensors)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.window  # also of a layer that another stage holds

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.window + query_length, 0

    @property
    def order(self) -> None:
        """The slots of the rows in the order of a forward; ``None`` for the order of slots."""
        return

    def forget(self) -> None:
        """Drop the former rows."""
        self.kept.clear()

    def clear(self) -> None:
        """Remove all rows, including former rows."""
        self.lengths, self.lags, self.stop, self.kept = [], {}, 0, {}
        for state in self._states():
            state.forget()

    def columns_of_positions(self, more: int) -> Tensor:
        """Return the column of each position of each row, with ``more`` new positions, [B, L].

        The columns after the last position of a row mean nothing.
        """
        begin_B1, lengths_B1 = self._bounds()
        positions_L = torch.arange(max(self.lengths) + more)
        columns_BL = torch.where(positions_L < lengths_B1, begin_B1, self.stop - lengths_B1) + positions_L
        return columns_BL.clamp(max=self.stop + more - 1)

    def positions_of_columns(self, more: int) -> Tensor:
        """Return the position of each row in each column of the window, with ``more`` new columns, [B, L].

        Where a row has no position, the number means nothing.
        """
        begin_B1, lengths_B1 = self._bounds()
        columns_L = torch.arange(self.window + more)
        first_BL = torch.where(columns_L < self.window, self.start - begin_B1, lengths_B1 - self.window)
        return (first_BL + columns_L).clamp(min=0, max=max(self.lengths) + more - 1)

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Return the first column and the length of each row, [B, 1]."""
        begin = [self.begin(slot) for slot in range(len(self.lengths))]
        begin_B1, lengths_B1 = torch.tensor([begin, self.lengths])[..., None]
        return begin_B1, lengths_B1

    def computing(self, model: Any) -> AbstractContextManager[None]:
        """Return a context for a forward of the model with this cache."""
        return nullcontext()

    def update_indexer(self, indexer_key_states: Tensor, layer_idx: int) -> Tensor:
        """Append keys of the indexer of a layer, in transformers up to 5.18 before the keys of its attention."""
        keys: Tensor = self._own(layer_idx).update_indexer(indexer_key_states)
        return keys

    @property
    def argument(self) -> Any:
        """The cache as an argument of the model."""
        return self

    def take(self, output: Any) -> None:
        """Take the states from an output of the model, unless it has written them into the cache."""

    def show_states(self) -> None:
        """Show the states of the rows to the next forward."""
        for state in self._states():
            state.show(continues=self.window > 0)

    def remember_step(self) -> None:
        """Keep the states of the rows until `cut`. Call it before each step that may be cut."""
        for state in self._states():
            state.remember_step()

    def _states(self) -> list[StateLayer]:
        return [layer for layer in self.layers if isinstance(layer, StateLayer)] if self._has_states else []

    def mask(self, more: int, lengths_B: Tensor) -> Tensor | None:
        """Return the attention mask of the rows and ``more`` new positions, [B, L]; ``None`` if it hides nothing.

        Args:
            lengths_B: the row lengths, on the device of the mask.
        """
        if min(self.lengths) == self.window:  # then no row lags
            return None
        lags = [self.lags.get(slot, 0) for slot in range(len(self.lengths))] if self.lags else []
        return mask_of(self.window, more, lengths_B, lags)

    def make_room(self, rows: int, more: int, before: int = 0) -> None:
        """Ensure memory for this number of rows, ``more`` columns after the window and ``before`` columns before it."""
        longest = max(self.lengths, default=0)
        fits = self.stop + more + self.is_static <= self.columns and before <= self.start
        if rows <= self.rows and fits and self.window <= columns(longest):
            return
        needed = before + longest + more
        larger = max(self.columns, min(self.most_columns, 1 << (needed + LEAST_COLUMNS).bit_length()))
        if rows > self.rows:
            self.rows = min(self.most_rows, max(rows, self._grown()))
        self._relocate(larger, before)

    def _grown(self) -> int:
        """Return the number of slots after an allocation for more rows. It grows by a share to allocate rarely."""
        return 2 * self.rows

    def compact(self) -> None:
        """Move the rows to the first columns."""
        self._relocate(self.columns, 0)

    def _relocate(self, columns: int, before: int) -> None:
        """Move the rows to column ``before`` in memory of ``columns`` columns. Afterwards, no row lags."""
        for layer in self.layers:
            layer.relocate(columns, before)
        self.lags = {}
        self.columns, self.stop = columns, before + self.window

    def grow(self, more: int) -> None:
        """Record that a forward has added ``more`` positions to each row."""
        self.lengths = [length + more for length in self.lengths]
        self.stop += more

    def settle(self, counts: Sequence[int]) -> None:
        """Keep the first positions that a forward has written after ``stop``: ``counts[slot]`` of each row."""
        lagging = {slot: lag for slot, lag in self.lags.items() if counts[slot]}
        if lagging:
            most, lags_N2 = max(counts[slot] for slot in lagging), torch.tensor([*lagging.items()])
            for layer in self.layers:
                if layer.is_initialized:  # else, another stage holds it
                    layer.draw_back(lags_N2, most)
        for state in self._states():
            state.settle(counts)
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        gained = [count - self.lags.get(slot, 0) for slot, count in enumerate(counts)]
        self.stop += max(gained)
        self.lags = {slot: max(gained) - own for slot, own in enumerate(gained) if own < max(gained)}

    def free(self, slot: int) -> None:
        """Remove a row. The last row moves into its slot. If former rows are kept, the two rows swap slots."""
        last, begin = len(self.lengths) - 1, self.begin(slot)
        end = begin + self.lengths[slot]
        if slot != last:
            for layer in self.layers:
                layer.move(slot, last, 0, self.stop, self._keeps)
            self.lengths[slot] = self.lengths[last]
        lag = self.lags.pop(last, 0)
        self.lags.pop(slot, None)
        if slot != last and lag:
            self.lags[slot] = lag
        self.lengths.pop()
        if self._keeps:
            self.kept[last] = begin, end
        self._move_stop()

    def cut(self, counts: Sequence[int]) -> None:
        """Drop the last positions of each row: ``counts[slot]`` of them."""
        for state in self._states():
            state.cut(counts)
        for slot, count in enumerate(counts):
            if count:
                self.lengths[slot] -= count
                self.lags[slot] = self.lags.get(slot, 0) + count
        self._move_stop()

    def _move_stop(self) -> None:
        """Move ``stop`` to the end of the foremost row, after it has left or was cut."""
        if self.lags and len(self.lags) == len(self.lengths):
            least = min(self.lags.values())
            self.lags = {slot: lag - least for slot, lag in self.lags.items() if lag > least}
            self.stop -= least

    def located(self, slot: int) -> tuple[SlotCache, int]:
        """Return the cache that holds a row or former row, and its slot there."""
        return self, slot

    def begin(self, slot: int) -> int:
        """Return the first column of a row or a former row."""
        if slot in self.kept:
            return self.kept[slot][0]
        return self.stop - self.lags.get(slot, 0) - self.lengths[slot]

    def append(self, layers: Sequence[Any], row: int, stop: int, length: int, displaced: int = -1) -> None:
        """Copy a row of another cache into the slot after the last row.

        Args:
            layers: of the other cache.
            row: index in these layers.
            stop: the column after its last position.
            length: number of its positions.
            displaced: the slot to which the former row in that slot moves; -1 drops the former row.
        """
        slot, is_first = len(self.lengths), not self.lengths
        if is_first:
            self.stop = 0
        before = 0 if is_first else max(0, length - max(self.lengths))
        self.make_room(max(slot, displaced) + 1, length if is_first else 0, before)
        former = self.kept.pop(slot, None)
        if former is not None and displaced >= 0:
            for layer in self.layers:
                layer.move(displaced, slot, *former)
            self.kept[displaced] = former
        if is_first:
            self.stop = length
        self._take(slot, layers, row, stop, length)
        self.lengths.append(length)

    def fork(self, slot: int, count: int) -> None:
        """Append copies of a row after the last row."""
        first, length = len(self.lengths), self.lengths[slot]
        self.make_room(first + count, 0)
        for copied in range(first, first + count):
            self.kept.pop(copied, None)
        for layer in self.layers:
            layer.fork(slot, first, count, self.stop)
        self.lengths += [length] * count
        if slot in self.lags:
            self.lags |= dict.fromkeys(range(first, first + count), self.lags[slot])

    def begin_with(self, other: Any, slot: int, length: int) -> None:
        """Replace all rows by one: the first ``length`` positions of a row or former row of another cache.

        With states, these are all of its positions.

        Args:
            other: a `SlotCache` or a `slot_parts.PartedSlots`.
        """
        other, slot = other.located(slot)
        begin, end = other.kept.get(slot, (0, 0))
        assert not self._has_states or length == (end - begin or other.lengths[slot])
        self.clear()
        self.make_room(1, length)
        self.lengths, self.stop = [length], length
        self._take(0, other.layers, slot, other.begin(slot) + length, length)

    def _take(self, slot: int, layers: Sequence[Any], row: int, stop: int, length: int) -> None:
        """Copy the ``length`` positions before column ``stop`` of a row in other layers to ``slot``."""
        for index, layer in enumerate(layers):
            if not layer.is_initialized:
                continue
            if self.stored is None or isinstance(layer, _SlotLayer):
                self._layer(index, layer).copy(slot, layer, row, self.stop, stop, length)
            else:
                taken = (each[row : row + 1, :, stop - length : stop] for each in (layer.keys, layer.values))
                made = _Held(*self.stored(*taken))
                self._layer(index, made).copy(slot, made, 0, self.stop, length, length)

    def _layer(self, index: int, like: Any) -> Any:
        own = self._own(index)
        own.match(like)
        return own

    def _own(self, index: int) -> Any:
        while len(self.layers) <= index:
            self.layers.append(_SlotLayer(self))
        return self.layers[index]

    def reserve(self, like: Any) -> None:
        """Allocate the maximum rows and columns, with the layer shapes of another cache. Rows keep their slots."""
        for index, layer in enumerate(like.layers):
            if layer.is_initialized:
                self._layer(index, layer)
        self.rows = self.most_rows
        self._relocate(self.most_columns, 0)


def mask_of(window: int, more: int, lengths_B: Tensor, lags: Sequence[int]) -> Tensor:
    """Return the attention mask of rows that end before ``more`` new positions, [B, L].

    Args:
        window: the columns before the new positions.
        lags: of each row; empty if none lags.
    """
    columns_L = torch.arange(window + more, device=lengths_B.device)
    if not lags:
        return (columns_L >= (window - lengths_B)[:, None]).long()
    ends_B = torch.tensor([window - lag for lag in lags], device=lengths_B.device)
    shown_BL = (columns_L >= (ends_B - lengths_B)[:, None]) & (columns_L < ends_B[:, None])
    return (shown_BL | (columns_L >= window)).long()


_HELD = ("keys", "values", "index_keys")
"""Attributes of a layer with a column for each position."""


class _Held(NamedTuple):
    keys: Tensor
    values: Tensor


def _tensors(layer: Any) -> list[Tensor]:
    """Return the tensors of a layer with a column for each position."""
    return [held for name in _HELD if (held := getattr(layer, name)) is not None]


def _fits(held: Tensor | None, states: Tensor) -> bool:
    """Return whether states match allocated memory in dtype and shape."""
    return held is not None and held.dtype == states.dtype and held.shape[1::2] == states.shape[1::2]


class _SlotLayer(CacheLayerMixin):
    """Keys and values [B, H, L, D] of one layer, and keys of its indexer [B, 1, L, D], if it has one."""

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache
        self.index_keys: Any = None
        self._device_of_positions = torch.device("cpu")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = map(self._zeros, (key_states, value_states))
        self.is_initialized = True
        self._cache.allocations += 1

    def _zeros(self, states: Tensor) -> Tensor:
        # Zeros: a masked position adds zero times its value, so the value must not be NaN.
        return states.new_zeros(self._cache.rows, states.shape[1], self._cache.columns, states.shape[3])

    def fits(self, key_states: Tensor, value_states: Tensor) -> bool:
        """Return whether the states match the allocated memory in dtype and shape."""
        return _fits(self.keys, key_states) and _fits(self.values, value_states)

    def match(self, like: Any) -> None:
        """Allocate memory for the contents of another layer, unless it fits."""
        if not self.fits(like.keys, like.values):
            self.lazy_initialization(like.keys, like.values)
        index_keys = getattr(like, "index_keys", None)
        if index_keys is not None:
            self._match_index(index_keys)

    def _match_index(self, states: Tensor) -> None:
        if not _fits(self.index_keys, states):
            self.index_keys = self._zeros(states)
            self._cache.allocations += 1

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append positions to all rows. Return the keys and values of the window, including the new positions."""
        if self._cache.stored is not None:
            key_states, value_states = self._cache.stored(key_states, value_states)
        if not self.fits(key_states, value_states):
            self.lazy_initialization(key_states, value_states)
        cache = self._cache
        rows, end = len(cache.lengths), cache.stop + key_states.shape[-2]
        self.keys[:rows, :, cache.stop : end] = key_states
        self.values[:rows, :, cache.stop : end] = value_states
        return self.keys[:rows, :, cache.start : end], self.values[:rows, :, cache.start : end]

    def update_indexer(self, states: Tensor) -> Tensor:
        """Append keys [B, L, D] of the indexer to all rows. Return the keys of the window, including the new ones."""
        self._append_index(states[:, None])
        keys: Tensor = self.index_keys[: len(states), 0, self._cache.start : self._cache.stop + states.shape[1]]
        return keys

    @property
    def indexer_position_ids(self) -> Tensor | None:
        """Positions of the columns [3, B, L], which Qwen4's indexers read; ``None`` before the first forward."""
        if not self._cache.window:
            return None
        positions_BL = self._cache.positions_of_columns(0)
        return positions_BL.to(self._device_of_positions).expand(3, -1, -1)

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor | None) -> None:
        """Ignore positions, which follow from the lengths of the rows, but not their device."""
        if positions is not None:
            self._device_of_positions = positions.device

    def update_index(self, states: Tensor) -> Tensor:
        """Append keys [B, 1, L, D] of the indexer to all rows. Return the keys of each row from its first position."""
        self._append_index(states)
        columns_BL = self._cache.columns_of_positions(states.shape[2]).to(states.device)
        keys: Tensor = self.index_keys[torch.arange(len(states), device=states.device)[:, None], :, columns_BL]
        return keys.transpose(1, 2)

    def _append_index(self, states: Tensor) -> None:
        self._match_index(states)
        stop = self._cache.stop
        self.index_keys[: len(states), :, stop : stop + states.shape[2]] = states

    def relocate(self, columns: int, at: int) -> None:
        """Move the window of all rows to column ``at`` in memory of ``columns`` columns and the cache's rows."""
        cache = self._cache
        rows, longest = len(cache.lengths), max(cache.lengths, default=0)
        for name in _HELD:
            held = getattr(self, name)
            if held is None:
                continue
            kept = self._aligned(held, rows, longest)
            if held.shape[0] == cache.rows and held.shape[2] == columns:
                kept, target = kept.clone(), held  # they overlap
                target[:rows, :, :at] = 0
                if cache.is_static:
                    target[:rows, :, at + longest :] = 0
            else:
                cache.allocations += 1
                target = held.new_zeros(cache.rows, held.shape[1], columns, held.shape[3])
                for slot in cache.kept:
                    target[slot, :, : held.shape[2]] = held[slot]
            target[:rows, :, at : at + longest] = kept
            setattr(self, name, target)

    def _aligned(self, held: Tensor, rows: int, longest: int) -> Tensor:
        """Return the last ``longest`` positions of each row, right-aligned, [B, H, L, D]."""
        cache = self._cache
        if not cache.lags:
            return held[:rows, :, cache.stop - longest : cache.stop]
        first_B1 = torch.tensor([[cache.stop - cache.lags.get(slot, 0) - longest] for slot in range(rows)])
        column_BL = (first_B1 + torch.arange(longest)).clamp(min=0).to(held.device)
        return held[torch.arange(rows, device=held.device)[:, None], :, column_BL].transpose(1, 2)

    def draw_back(self, lags_N2: Tensor, count: int) -> None:
        """Copy ``count`` positions after the cache's ``stop`` to the ends of rows that lag.

        Args:
            lags_N2: slots and lags of these rows.
        """
        stop, lags_N2 = self._cache.stop, lags_N2.to(self.keys.device)
        slot_N1, lag_N1 = lags_N2.split(1, 1)
        column_1L = torch.arange(stop, stop + count, device=lags_N2.device)[None]
        for held in _tensors(self):
            held[slot_N1, :, column_1L - lag_N1] = held[slot_N1, :, column_1L]

    def move(self, slot: int, source: int, start: int, stop: int, exchange: bool = False) -> None:
        """Copy the columns of slot ``source`` to ``slot``, or swap them."""
        for held in _tensors(self):
            columns = held[:, :, start:stop]
            lost = columns[slot].clone() if exchange else None
            columns[slot] = columns[source]
            if lost is not None:
                columns[source] = lost

    def fork(self, slot: int, first: int, count: int, stop: int) -> None:
        """Copy the columns before ``stop`` of a slot to ``count`` slots from ``first``."""
        for held in _tensors(self):
            held[first : first + count, :, :stop] = held[slot, :, :stop]
            if self._cache.is_static:
                held[first : first + count, :, stop:] = 0

    def copy(self, slot: int, source: Any, row: int, stop: int, source_stop: int, length: int) -> None:
        """Copy ``length`` positions of a row of another layer into a slot. Set the columns before them to zero."""
        for name in _HELD:
            own, theirs = getattr(self, name), getattr(source, name, None)
            if theirs is None:
                continue
            own[slot, :, : stop - length] = 0
            if self._cache.is_static:
                own[slot, :, stop:] = 0
            own[slot, :, stop - length : stop] = theirs[row, :, source_stop - length : source_stop]

    @property
    def held(self) -> list[Tensor]:
        """The allocated tensors. None, if another stage holds the layer."""
        return _tensors(self)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.window + query_length, 0

    def get_seq_length(self) -> int:
        return self._cache.window

    def get_max_length(self) -> int:
        return -1


class _SlotStateLayer(StateLayer, _SlotLayer):
    """Keys, values and states of one layer."""

    def __init__(self, cache: SlotCache, count: int) -> None:
        _SlotLayer.__init__(self, cache)
        StateLayer.__init__(self, cache, count)

    @property
    def held(self) -> list[Tensor]:
        return [held for part in _PARTS for held in part.held.fget(self)]

    def lazy_initialization(self, *keys_and_values: Tensor, **given: Any) -> None:
        if keys_and_values:
            _SlotLayer.lazy_initialization(self, *keys_and_values)
        else:
            StateLayer.lazy_initialization(self, **given)

    def match(self, like: Any) -> None:
        for part in _PARTS:
            if part.held.fget(like):
                part.match(self, like)

    def relocate(self, columns: int, at: int) -> None:
        for part in _PARTS:
            part.relocate(self, columns, at)

    def move(self, slot: int, source: int, start: int, stop: int, exchange: bool = False) -> None:
        for part in _PARTS:
            part.move(self, slot, source, start, stop, exchange)

    def fork(self, slot: int, first: int, count: int, stop: int) -> None:
        for part in _PARTS:
            part.fork(self, slot, first, count, stop)

    def draw_back(self, lags_N2: Tensor, count: int) -> None:
        _SlotLayer.draw_back(self, lags_N2, count)

    def copy(self, slot: int, source: Any, row: int, stop: int, source_stop: int, length: int) -> None:
        for part in _PARTS:
            if part.held.fget(source):
                part.copy(self, slot, source, row, stop, source_stop, length)


_PARTS: tuple[Any, ...] = (_SlotLayer, StateLayer)


def _layer_like(cache: SlotCache, layer: Any) -> Any:
    """Return an empty layer for the contents of a layer of transformers' cache."""
    count = number_of_states(layer)
    if not count:
        return _SlotLayer(cache)
    return _SlotStateLayer(cache, count) if isinstance(layer, CacheLayerMixin) else StateLayer(cache, count)
