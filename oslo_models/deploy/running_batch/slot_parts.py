"""Slots in parts, one for each class of length: short rows take neither the memory nor the attention of long ones.

Each part is a `SlotCache` with a power of two as its number of columns. A row that outgrows its part moves to the next
one. The layers attend to each part by itself, see `attention_parts`.

Legend:
    B: rows.
    L: columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, TypeAlias

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from oslo_models.deploy.running_batch.limits import LEAST_COLUMNS, columns
from oslo_models.deploy.running_batch.slot_cache import SlotCache, Stored, mask_of
from oslo_models.deploy.running_batch.slot_states import has_states
from oslo_models.fusion.attention_parts import IMPLEMENTATIONS, PartStates
from oslo_models.pipeline.sharded_model import ShardedModel

LEAST = 512
"""Columns of the first part. Each part costs a call of the attention function in each layer."""
SPARE, SPARE_SHARE = LEAST_COLUMNS, 16
"""Minimum columns that a row which enters a part leaves free, and their share of its length, so that rows rarely move.
They hold the drafted tokens of a step."""
PATIENCE = 64
"""Steps until a part gives back memory that it does not need."""
GROWTH = 8
"""A part with full memory grows by this share of its slots."""
ON_GPUS = False
"""Whether rows on GPUs are in parts. Off until it is measured there: each part launches the kernels of an attention."""
TYPES = frozenset(
    (
        *("afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "beam", "bert-generation", "biogpt"),
        *("bitnet", "bloom", "chameleon", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text"),
        *("cosmos3_edge_text", "ctrl", "cwm", "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "dory", "dots1"),
        *("ernie4_5",),
        *("ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "flint", "gemma", "gemma2", "gemma3_text"),
        *("gemma3n_text", "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite"),
        *("glm4v_moe_text",),
        *("glm4v_text", "glm_ocr_text", "gpt2", "gpt_bigcode", "gpt_oss", "gptj", "granite"),
        *("granite4_vision_text", "granite_docling_text", "granite_swa", "granitemoe", "granitemoe_swa"),
        *("granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3"),
        *(
            "hyperclovax",
            "jais2",
            "kolibri1",
            "laguna",
            "llama",
            "llama4_text",
            "longcat_flash",
            "mellum",
            "mimo_v2_flash",
        ),
        *("minicpm3", "mistral4", "mpt", "youtu"),
        *("minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "modernbert-decoder"),
        *("muse_glimmer_text", "nanochat", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt"),
        *("paddleocr_vl_text", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_5_omni_text"),
        *("qwen2_5_vl_text", "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_omni_moe_text"),
        *("qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss", "smollm3", "solar_open", "stablelm"),
        *("starcoder2", "vaultgemma"),
    )
)
"""Types of decoders with tested parts. Their layers pass keys and values from the cache to the attention function."""


def reason_against_parts(model: ShardedModel) -> str | None:
    """Return why the rows of a model are in one part; ``None`` if they can be in several."""
    if model.device.type == "cuda" and not ON_GPUS:
        return "its device is a GPU: each part launches the kernels of an attention, which was not measured"
    if has_states(model.config):
        return "some of its blocks keep states of rows"
    config = model.config.get_text_config(decoder=True)
    if config.model_type not in TYPES:
        return f"the attention of model_type={config.model_type!r} was not tested with parts"
    if getattr(model, "token_division", None) is not None:
        return "its tokens are divided over ranks"
    attention = config._attn_implementation
    if attention == "eager" and getattr(config, "reorder_and_upcast_attn", False):
        return "its layers compute eager attention themselves: reorder_and_upcast_attn=True in its configuration"
    if attention not in IMPLEMENTATIONS and not getattr(model, "has_exact_rollouts", False):
        return f"attn_implementation={attention!r}: parts need 'sdpa' or 'eager'"
    return None


def sizes_of_parts(length: int) -> list[int]:
    """Return the columns of the parts for rows of up to ``length`` tokens."""
    most, sizes = columns(length), [LEAST]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return [*sizes[:-1], most]


class PartedSlots(Cache):
    """A `SlotCache` in parts. Slots are numbered as in a `SlotCache`; each is a slot of one part.

    With several parts, a forward computes the rows part by part, see ``order``, and needs a mask with as many columns
    as the part with the widest window.

    Args:
        rows, length, keeps, stored: as of `SlotCache`.

    Attributes:
        order: the slots of the rows in the order of a forward; ``None`` if they are in one part, in the order of slots.
        shown: the parts with rows, in the order of a forward.
    """

    def __init__(self, rows: int, length: int, keeps: bool = False, stored: Stored | None = None) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)  # stays empty: the parts have the layers
        self.most_rows, self.most_columns = rows, columns(length)
        self._length, self._keeps, self._stored = length, keeps, stored
        self._parts = [_Part(rows, size, keeps, stored) for size in sizes_of_parts(length)]
        self._note()

    def _note(self) -> None:
        """Note the places of all rows and former rows, after some have changed."""
        self._places = {slot: (part, own) for part in self._parts for own, slot in part.places()}
        self.shown = [part for part in self._parts if part.slots]
        order = [slot for part in self.shown for slot in part.slots]
        self._count = len(order)
        self.order = order if len(self.shown) > 1 or order != [*range(self._count)] else None

    @property
    def lengths(self) -> list[int]:
        """Of the rows, by slot."""
        rows = (self._places[slot] for slot in range(self._count))
        return [part.lengths[own] for part, own in rows]

    @property
    def lags(self) -> dict[int, int]:
        """Of the rows that lag in their part, by slot."""
        return {part.slots[own]: lag for part in self.shown for own, lag in part.lags.items()}

    @property
    def window(self) -> int:
        """Number of columns of the widest window of a part."""
        return max((part.window for part in self.shown), default=0)

    @property
    def tensors(self) -> list[Tensor]:
        return [held for part in self._parts for held in part.tensors]

    @property
    def bytes_held(self) -> int:
        return sum(held.nbytes for held in self.tensors)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.window

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.window + query_length, 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Append positions to all rows. Return the keys and values, as `PartStates` if there are several parts."""
        if len(self.shown) == 1:
            return self.shown[0].layers[layer_idx].update(key_states, value_states)
        sizes = [len(part.slots) for part in self.shown]
        states = zip(self.shown, key_states.split(sizes), value_states.split(sizes), strict=True)
        keys, values = zip(*(part.layers[layer_idx].update(*given) for part, *given in states), strict=True)
        return PartStates(keys), PartStates(values)

    def mask(self, more: int, lengths_B: Tensor) -> Tensor | None:
        """See `SlotCache.mask`. The rows are in the order of a forward."""
        window = self.window
        if min(self.lengths) == window:
            return None
        lags = [part.lags.get(own, 0) for part in self.shown for own in range(len(part.slots))]
        return mask_of(window, more, lengths_B, lags if any(lags) else [])

    def make_room(self, rows: int, more: int) -> None:
        """Ensure memory for ``more`` columns after each of the rows. Rows that outgrow their part move."""
        for part in self._parts:
            if part.slots and part.stop + more > part.most_columns:
                self._move_long_rows(part)
            if part.slots:
                part.make_room(len(part.slots), more)
            if part.gives_back():
                self._note()

    def _part_of(self, length: int) -> _Part:
        """Return the part that a row of this length enters."""
        needed = length + max(SPARE, length // SPARE_SHARE)
        return next((part for part in self._parts if needed <= part.most_columns), self._parts[-1])

    def _move_long_rows(self, part: _Part) -> None:
        """Move the rows with less than the spare columns to longer parts."""
        leaving: dict[int, list[int]] = {}
        for own, slot in enumerate(part.slots):
            target = self._parts.index(self._part_of(part.lengths[own]))
            if self._parts[target].most_columns > part.most_columns:
                leaving.setdefault(target, []).append(slot)
        for index, slots in leaving.items():
            target_part = self._parts[index]
            target_part.expect([part.lengths[part.slots.index(slot)] for slot in slots])
            for slot in sorted(slots):  # equal rows stay in the order of slots
                own = part.slots.index(slot)
                length = part.lengths[own]
                target_part.enter(part.layers, own, part.begin(own) + length, length, slot)
                part.leave(own)
        self._note()

    def grow(self, more: int) -> None:
        """See `SlotCache.grow`."""
        for part in self.shown:
            part.grow(more)

    def settle(self, counts: Sequence[int]) -> None:
        """See `SlotCache.settle`."""
        for part in self.shown:
            part.settle([counts[slot] for slot in part.slots])

    def cut(self, counts: Sequence[int]) -> None:
        """See `SlotCache.cut`."""
        for part in self.shown:
            part.cut([counts[slot] for slot in part.slots])

    def free(self, slot: int) -> None:
        """See `SlotCache.free`."""
        last, (part, own) = self._count - 1, self._places[slot]
        part.leave(own, last if self._keeps else None)
        if slot != last:
            moved = self._places[last][0]
            moved.slots[moved.slots.index(last)] = slot
        self._note()

    def append(self, layers: Sequence[Any], row: int, stop: int, length: int, displaced: int = -1) -> None:
        """See `SlotCache.append`."""
        slot = self._count
        former = self._places.get(slot)
        if displaced >= 0 and former is not None:
            self._drop(displaced)
            former[0].former[former[1]] = displaced
        else:
            self._drop(slot)
        self._part_of(length).enter(layers, row, stop, length, slot)
        self._note()

    def _drop(self, slot: int) -> None:
        """Drop the former row in a slot, if there is one."""
        if slot in self._places:
            part, own = self._places.pop(slot)
            del part.kept[own], part.former[own]

    def fork(self, slot: int, count: int) -> None:
        """See `SlotCache.fork`."""
        part, own = self._places[slot]
        assert not part.kept, "copies would take the slots of former rows"
        part.fork(own, count)
        part.slots += range(self._count, self._count + count)
        self._note()

    def located(self, slot: int) -> tuple[SlotCache, int]:
        """See `SlotCache.located`."""
        return self._places[slot]

    def forget(self) -> None:
        """See `SlotCache.forget`."""
        for part in self._parts:
            part.forget()
            part.former.clear()
        self._note()

    def clear(self) -> None:
        """See `SlotCache.clear`."""
        for part in self._parts:
            part.clear()
            part.slots, part.former = [], {}
        self._note()

    def reserved(self, like: SlotCache) -> SlotCache:
        """Return a `SlotCache` with the same rows and former rows in its maximum memory."""
        made = SlotCache(self.most_rows, self._length, self._keeps, stored=self._stored)
        made.reserve(like)
        lengths = self.lengths
        stop = max(lengths, default=0)
        for slot, (part, own) in self._places.items():
            begin, end = part.kept.get(own, (part.begin(own), 0))
            length = end - begin if own in part.kept else part.lengths[own]
            made.stop = length if own in part.kept else stop
            made._take(slot, part.layers, own, begin + length, length)
            if own in part.kept:
                made.kept[slot] = 0, length
        made.lengths, made.stop = lengths, stop
        return made


class _Part(SlotCache):
    """The rows of one class of length.

    Attributes:
        slots: of the batch, by slot of this part.
        former: slots of the batch that hold former rows, by slot of this part.
    """

    def __init__(self, rows: int, size: int, keeps: bool, stored: Stored | None) -> None:
        super().__init__(rows, size, keeps, stored=stored)
        self.most_columns = size
        self.slots: list[int] = []
        self.former: dict[int, int] = {}
        self._spare_steps = 0

    def _grown(self) -> int:
        return self.rows + self.rows // GROWTH

    def places(self) -> Iterator[tuple[int, int]]:
        """Yield the slots of this part with their slots of the batch."""
        yield from enumerate(self.slots)
        yield from self.former.items()

    def expect(self, lengths: Sequence[int]) -> None:
        """Ensure memory for further rows at once."""
        longer = max(lengths) - max(self.lengths, default=0)
        self.make_room(len(self.lengths) + len(self.kept) + len(lengths), max(0, longer))

    def enter(self, layers: Sequence[Any], row: int, stop: int, length: int, slot: int) -> None:
        """Append a row of other layers. A former row in its place moves."""
        own, displaced = len(self.lengths), -1
        if own in self.kept:
            displaced = next(other for other in count(own + 1) if other not in self.kept)
            self.former[displaced] = self.former.pop(own)
        self.append(layers, row, stop, length, displaced)
        self.slots.append(slot)

    def leave(self, own: int, former: int | None = None) -> None:
        """Remove a row. Keep it as the former row of this slot of the batch, if there is one."""
        self.free(own)
        last = len(self.lengths)
        self.slots[own] = self.slots[-1]
        self.slots.pop()
        if former is None:
            self.kept.pop(last, None)
        else:
            self.former[last] = former

    def gives_back(self) -> bool:
        """Count a step. Give back memory that no step has needed for a while. Return whether former rows may move."""
        used = len(self.lengths) + len(self.kept)
        self._spare_steps = self._spare_steps + 1 if self.rows > used + used // 4 else 0
        if self._spare_steps < PATIENCE:
            return False
        for own in [own for own in self.kept if own >= used]:
            free = next(other for other in count(len(self.lengths)) if other not in self.kept)
            self.kept[free] = bounds = self.kept.pop(own)
            self.former[free] = self.former.pop(own)
            for layer in self.layers:
                layer.move(free, own, *bounds)
        self.rows, self._spare_steps = used, 0
        self._relocate(self.columns if used else 0, 0)
        return True


Slots: TypeAlias = "SlotCache | PartedSlots"
