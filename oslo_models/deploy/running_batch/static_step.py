"""Decoding steps of fixed shapes, which a CUDA graph can replay: buckets of rows and of attended columns.

A graph repeats the kernels of one step with the same addresses and shapes. So each step owns one input tensor, computes
all rows of its bucket, and attends to all columns of its bucket. Padding rows fill the bucket. They write to the last
column of their slots, which belongs to no row.

The code between capture and replay does not depend on graphs: with `run_eagerly` in place of a capture, it runs on any
device.

Legend:
    B: rows of the bucket.
    L: columns of the bucket.
    W: new positions of a row: 1, or with drafts, 1 and the maximum number of drafted tokens.
    H: key-value heads of this rank.
    D: size of a head.
    V: vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.fusion.decoding import rounded_length
from oslo_models.fusion.grouped_attention import GROUPED
from oslo_models.layers.blockwise_attention import TORCH_ATTENTION

Compute = Callable[[], Tensor]
Capture = Callable[[Compute], Compute]
"""Captures a computation of fixed shapes. Returns a function that repeats it into the same result tensor."""
SPARE_COLUMNS = 64
"""Minimum columns between the moved rows and the next longer bucket, so that rows rarely move."""


def run_eagerly(compute: Compute) -> Compute:
    """Stand in for a capture: each replay computes the step again."""
    return compute


def for_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return a host tensor, pinned for asynchronous copies to a GPU. torch keeps pinned memory until the copy ends."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def to_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype = torch.long) -> Tensor:
    """Return a tensor on a device, with one copy."""
    return for_device(values, device, dtype).to(device, non_blocking=True)


def to_host(x: Tensor) -> Tensor:
    """Return a tensor on the host, with one copy, through pinned memory, and one wait for the current stream."""
    if x.device.type != "cuda":
        return x
    held = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    held.copy_(x, non_blocking=True)
    torch.cuda.current_stream(x.device).synchronize()
    return held


class StaticSteps:
    """The decoding steps of a batch, one for each bucket of rows and columns, with and without drafts.

    Args:
        forward: computes the logits [B, V] from a cache, ids, positions and options.
        cache: of the batch. It must be static.
        config: of the decoder's attention layers. They may attend by groups of heads.
        drafted: maximum drafted tokens of a row.
    """

    def __init__(
        self, forward: Callable[..., Tensor], cache: SlotCache, config: Any, capture: Capture, drafted: int = 0
    ) -> None:
        self._forward, self._cache, self._config, self._capture = forward, cache, config, capture
        self._most_new = 1 + drafted
        self._steps: dict[tuple[int, int, int], tuple[_Inputs, Compute]] = {}
        self._allocations = -1
        self._logits: Tensor | None = None  # for the largest bucket; smaller buckets use its first rows

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Drop all steps, because the model or the addresses of the cache have changed."""
        self._steps.clear()
        self._logits = None

    def run(self, tokens: Sequence[list[int]]) -> Tensor:
        """Compute the logits [rows, W, V] after the new tokens of each row. The next step overwrites them.

        Without drafts, the step writes each position to the end of its row. With drafts, it writes them after the
        cache's ``stop``.
        """
        cache, width = self._cache, self._most_new if any(len(row) > 1 for row in tokens) else 1
        rows = min(1 << (len(tokens) - 1).bit_length(), cache.most_rows)
        cache.make_room(rows, width)
        if rounded_length(cache.window + SPARE_COLUMNS) < rounded_length(cache.stop + width):
            cache.compact()
        if self._allocations != cache.allocations:
            self.clear()
            self._allocations = cache.allocations
        columns = min(rounded_length(cache.stop + width), cache.columns)
        known = self._steps.get((rows, columns, width))
        if known is None:
            inputs = _Inputs(cache, rows, columns, width)
            inputs.load(tokens)
            known = self._steps[rows, columns, width] = (inputs, self._capture(self._computation(inputs)))
        inputs, replay = known
        inputs.load(tokens)
        return replay()[: len(tokens) * width].unflatten(0, (-1, width))

    def _computation(self, inputs: _Inputs) -> Compute:
        """Return the step. A graph keeps only `inputs`. All other tensors belong to the cache or the model."""
        slots, width = _StaticSlots(self._cache, inputs), inputs.width

        def compute() -> Tensor:
            columns_L = inputs.columns_L
            shown_BL = (columns_L >= inputs.first_B[:, None]) & (columns_L <= inputs.last_B[:, None])
            if width > 1:  # the model's own mask is causal from here on
                shown_BL = shown_BL | (columns_L >= inputs.stop)
            options = {"next_sequence_length": width, "attention_mask": shown_BL.long()}
            with _by_groups_of_heads(self._config):
                logits = self._forward(slots, inputs.ids_BW, inputs.positions_BW, options, keep=width)
            return self._shared(logits)

        return compute

    def _shared(self, logits: Tensor) -> Tensor:
        """Copy logits [B * W, V] to the buffer that all steps share, in float32 or wider."""
        count, vocabulary = logits.shape
        held = self._logits
        if held is None:
            dtype = torch.promote_types(logits.dtype, torch.float32)
            held = self._logits = logits.new_empty(self._cache.most_rows * self._most_new, vocabulary, dtype=dtype)
        return held[:count].copy_(logits)


class _Inputs:
    """Step inputs at fixed addresses: the tokens, positions and written columns of each row.

    Attributes:
        stop: see `SlotCache`.
        first_B, last_B: the first and the last column to which each row attends, besides columns from ``stop``.
        slots_B, columns_L: the slots and columns of the bucket.
    """

    def __init__(self, cache: SlotCache, rows: int, columns: int, width: int) -> None:
        self._cache, self._rows, self.width = cache, rows, width
        device = next(layer.keys.device for layer in cache.layers if layer.is_initialized)
        self._packed = torch.zeros(rows, 3 * width + 3, dtype=torch.long, device=device)
        self.ids_BW, self.positions_BW, self.written_BW, rest_B3 = self._packed.split((width, width, width, 3), 1)
        self.first_B, self.last_B, stop_B = rest_B3.unbind(1)
        self.stop = stop_B[0]
        self.slots_B, self.columns_L = torch.arange(rows, device=device), torch.arange(columns, device=device)

    def load(self, tokens: Sequence[list[int]]) -> None:
        """Load the tokens of the rows, and their columns in the cache, with one copy."""
        cache, width = self._cache, self.width
        values = []
        for slot, (row, length) in enumerate(zip(tokens, cache.lengths, strict=True)):
            end = cache.stop - cache.lags.get(slot, 0)
            padded = row + row[-1:] * (width - len(row))
            positions = [length + min(place, len(row) - 1) for place in range(width)]
            written = [end] if width == 1 else range(cache.stop, cache.stop + width)
            values.append([*padded, *positions, *written, end - length, end - (width > 1), cache.stop])
        # padding rows attend to one column
        padding = [*[0] * (2 * width), *[cache.columns - 1] * width, *[cache.stop] * 3]
        values += [padding] * (self._rows - len(tokens))
        self._packed.copy_(for_device(values, self._packed.device), non_blocking=True)


class _StaticSlots(Cache):
    """View of the first rows and columns of a `SlotCache`. A step appends new positions to each row.

    transformers builds masks for it as for static caches: from tensors alone, independent of their values.
    """

    def __init__(self, cache: SlotCache, inputs: _Inputs) -> None:
        self.columns, self.stop = len(inputs.columns_L), inputs.stop
        super().__init__(layers=[_StaticLayer(layer, inputs) for layer in cache.layers])

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.stop

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns, 0


class _StaticLayer(CacheLayerMixin):
    """Keys and values [B, H, L, D] of one layer. Holds no reference to its cache, so both are freed with the step."""

    is_compileable = True

    def __init__(self, layer: Any, inputs: _Inputs) -> None:
        super().__init__()
        self._memory, self._columns, self._inputs = (layer.keys, layer.values), len(inputs.columns_L), inputs
        self.keys, self.values = (held[: len(inputs.slots_B), :, : self._columns] for held in self._memory)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new positions of each row. Return the keys and values of the bucket."""
        for held, states in zip(self._memory, (key_states, value_states), strict=True):
            held[self._inputs.slots_B[:, None], :, self._inputs.written_BW] = states.transpose(1, 2)
        return self.keys, self.values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the memory is allocated")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._columns, 0

    def get_seq_length(self) -> Any:
        return self._inputs.stop

    def get_max_length(self) -> int:
        return self._columns


@contextmanager
def _by_groups_of_heads(config: Any) -> Iterator[None]:
    """Context in which torch's attention reads keys and values once for all query heads of a group.

    With a mask, torch would copy them for each query head.
    """
    own = config._attn_implementation
    if own in TORCH_ATTENTION:
        config._attn_implementation = GROUPED
    try:
        yield
    finally:
        config._attn_implementation = own
