"""Decoding steps of fixed shapes, which a CUDA graph can replay: buckets of rows and of attended columns.

A graph repeats the kernels of one step with the same addresses and shapes. So each step owns one input tensor, computes
all rows of its bucket, and attends to all columns of its bucket. Padding rows fill the bucket. They write to the last
column of their slots, which belongs to no row.

The code between capture and replay does not depend on graphs: with `run_eagerly` in place of a capture, it runs on any
device.

Legend:
    B: rows of the bucket.
    L: columns of the bucket.
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
    """The decoding steps of a batch, one for each bucket of rows and columns.

    Args:
        forward: computes the logits [B, V] from a cache, ids, positions and options.
        cache: of the batch. It must be static.
        config: of the decoder's attention layers. They may attend by groups of heads.
    """

    def __init__(self, forward: Callable[..., Tensor], cache: SlotCache, config: Any, capture: Capture) -> None:
        self._forward, self._cache, self._config, self._capture = forward, cache, config, capture
        self._steps: dict[tuple[int, int], tuple[_Inputs, Compute]] = {}
        self._allocations = -1
        self._logits: Tensor | None = None  # for the largest bucket; smaller buckets use its first rows

    def __len__(self) -> int:
        return len(self._steps)

    def clear(self) -> None:
        """Drop all steps, because the model or the addresses of the cache have changed."""
        self._steps.clear()
        self._logits = None

    def run(self, tokens: Sequence[int]) -> Tensor:
        """Compute the logits [rows, V] after the newest token of each row. The next step overwrites them."""
        cache = self._cache
        rows = min(1 << (len(tokens) - 1).bit_length(), cache.most_rows)
        cache.make_room(rows, 1)
        if rounded_length(cache.window + SPARE_COLUMNS) < rounded_length(cache.stop + 1):
            cache.compact()
        if self._allocations != cache.allocations:
            self.clear()
            self._allocations = cache.allocations
        columns = min(rounded_length(cache.stop + 1), cache.columns)
        known = self._steps.get((rows, columns))
        if known is None:
            inputs = _Inputs(cache, rows, columns)
            inputs.load(tokens)
            known = self._steps[rows, columns] = (inputs, self._capture(self._computation(inputs)))
        inputs, replay = known
        inputs.load(tokens)
        return replay()[: len(tokens)]

    def _computation(self, inputs: _Inputs) -> Compute:
        """Return the step. A graph keeps only `inputs`. All other tensors belong to the cache or the model."""
        slots = _StaticSlots(self._cache, inputs)

        def compute() -> Tensor:
            first_B = inputs.last_B - inputs.positions_B  # so padding rows attend to one column
            shown_BL = (inputs.columns_L >= first_B[:, None]) & (inputs.columns_L <= inputs.last_B[:, None])
            options = {"next_sequence_length": 1, "attention_mask": shown_BL.long()}
            with _by_groups_of_heads(self._config):
                logits_BV = self._forward(slots, inputs.ids_B[:, None], inputs.positions_B[:, None], options)
            return self._shared(logits_BV)

        return compute

    def _shared(self, logits_BV: Tensor) -> Tensor:
        """Copy logits to the buffer that all steps share, in float32 or wider."""
        rows, vocabulary = logits_BV.shape
        held = self._logits
        if held is None:
            dtype = torch.promote_types(logits_BV.dtype, torch.float32)
            held = self._logits = logits_BV.new_empty(self._cache.most_rows, vocabulary, dtype=dtype)
        return held[:rows].copy_(logits_BV)


class _Inputs:
    """Step inputs at fixed addresses: the token, position and written column of each row.

    Attributes:
        stop: see `SlotCache`.
        last_B: the last column to which each row attends.
        slots_B, columns_L: the slots and columns of the bucket.
    """

    def __init__(self, cache: SlotCache, rows: int, columns: int) -> None:
        self._cache, self._rows = cache, rows
        device = next(layer.keys.device for layer in cache.layers if layer.is_initialized)
        self._packed_5B = torch.zeros(5, rows, dtype=torch.long, device=device)
        self.ids_B, self.positions_B, self.written_B, self.last_B, stop_B = self._packed_5B
        self.stop = stop_B[0]
        self.slots_B, self.columns_L = torch.arange(rows, device=device), torch.arange(columns, device=device)

    def load(self, tokens: Sequence[int]) -> None:
        """Load the tokens of the rows, and their columns in the cache, with one copy."""
        cache, padding = self._cache, [0] * (self._rows - len(tokens))
        last = [cache.stop - cache.lags.get(slot, 0) for slot in range(self._rows)]
        written = [*last[: len(tokens)], *[cache.columns - 1] * len(padding)]
        values = [[*tokens, *padding], [*cache.lengths, *padding], written, last, [cache.stop] * self._rows]
        self._packed_5B.copy_(for_device(values, self._packed_5B.device), non_blocking=True)


class _StaticSlots(Cache):
    """View of the first rows and columns of a `SlotCache`. A step appends one position to each row.

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
        """Write one position of each row. Return the keys and values of the bucket."""
        for held, states in zip(self._memory, (key_states, value_states), strict=True):
            held[self._inputs.slots_B, :, self._inputs.written_B] = states[:, :, 0]
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
