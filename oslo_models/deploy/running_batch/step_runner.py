"""Computes the steps of the running batch on one rank: transformers' forward with the batch's own cache.

Legend:
    B: rows.
    L: positions.
    V: vocabulary.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from oslo_models.cache_argument import generation_name, name_in_model
from oslo_models.deploy.running_batch.graphs import CaptureError, capture_of
from oslo_models.deploy.running_batch.head_drafts import HeadStates, head_states
from oslo_models.deploy.running_batch.head_product import PackedHead, fast_head
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.own_caches import slots_of
from oslo_models.deploy.running_batch.position_tables import looking_up, position_table
from oslo_models.deploy.running_batch.prompt_images import (
    NO_OFFSETS,
    ImagesError,
    PromptImages,
    PromptInProgress,
    share_failure,
)
from oslo_models.deploy.running_batch.prompt_sounds import PromptSound
from oslo_models.deploy.running_batch.row_adapters import ModelAdapters
from oslo_models.deploy.running_batch.slot_cache import SlotCache, Stored
from oslo_models.deploy.running_batch.slot_parts import PartedSlots, Slots, reason_against_parts, sizes_of_parts
from oslo_models.deploy.running_batch.slot_states import has_index, layers_with_states
from oslo_models.deploy.running_batch.static_step import StaticSteps, to_device
from oslo_models.deploy.running_batch.step import Step
from oslo_models.deploy.running_batch.token_states import computing_by_tokens, mixers
from oslo_models.fusion.attention_parts import attending_by_parts, layers_by_parts
from oslo_models.layers.invariant_sums import rounded_states
from oslo_models.pipeline.sharded_model import ShardedModel
from oslo_models.pipeline.stage_runner import OtherStageError

PASS_POSITIONS = frozenset(("moss_transcribe_diarize",))
"""Types whose forward passes ``position_ids`` to a decoder without naming them."""


def stored_states(model: ShardedModel) -> Stored | None:
    """Return the function that rounds keys and values for `use_exact_rollouts`; ``None`` for other models."""
    if not getattr(model, "has_exact_rollouts", False):
        return None
    return partial(rounded_states, most=model.config.get_text_config(decoder=True).max_position_embeddings)


class _Slot(NamedTuple):
    """Attributes of a row.

    Attributes:
        offsets: see `PromptInProgress`.
        adapter: see `row_adapters`.
    """

    offsets: tuple[int, ...] = NO_OFFSETS
    adapter: int = 0


class _Arranged(NamedTuple):
    """Inputs of a forward of all rows.

    Attributes:
        ids, positions: [B, L]; with images, positions are [3 or 4, B, L].
        mask: see `SlotCache.mask`.
        order: the slots of the rows in the order of the forward; ``None`` for the order of slots.
        slots: the attributes of the rows, in the order of the forward.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor | None
    order: list[int] | None
    slots: list[_Slot]

    def by_slot(self, values: Tensor) -> Tensor:
        """Return values of the rows in the order of slots."""
        if self.order is None:
            return values
        return values[to_device(sorted(range(len(self.order)), key=self.order.__getitem__), values.device)]


class StepRunner:
    """The rows of the batch on one rank.

    Prompts are computed in separate caches: several prompts together, or one prompt chunk by chunk while the rows go
    on. Afterwards their keys, values and states are copied into slots.

    Args:
        keeps_logits: only the last pipeline stage gets logits. The other stages get an empty tensor, [0, V].
        packed: the model's head, if it may be packed.
        adapters: of the model.

    Attributes:
        numbers: the call number of each row.
        images: the images, or the sound, of the prompt that the next step begins; ``None`` without them.
        static: decoding steps of fixed shapes, which CUDA graphs replay; ``None`` for eager decoding.
        eager_reason: why decoding is eager.
    """

    def __init__(
        self,
        model: ShardedModel,
        limits: BatchLimits,
        keeps_logits: bool = False,
        packed: PackedHead | None = None,
        adapters: ModelAdapters | None = None,
    ) -> None:
        self.model, self._keeps_logits, self._packed = model, keeps_logits, packed
        self._adapters = adapters or ModelAdapters(model)
        # looked up once, because each lookup takes as long as a layer
        named_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._takes_positions = named_positions or model.config.model_type in PASS_POSITIONS
        self._position_table = None if self._takes_positions else position_table(model)
        self._device, self._can_keep_few = model.device, model._supports_logits_to_keep()
        capture, self.eager_reason = capture_of(model)
        self._heads = head_states(model) if limits.by_heads else None
        if self._heads is not None:
            capture, self.eager_reason = None, "the model's MTP heads draft tokens"
        stored, self._layers = stored_states(model), layers_with_states(model)
        self._mixers = mixers(model, self._layers) if limits.drafted and self._layers else []
        self._slots = slots_of(model.config)
        named = name_in_model(model.forward, {}) if self._layers else None  # Mamba had a name of its own up to 5.23
        self._cache_name = named or generation_name()
        self._config = model.config.get_text_config(decoder=True)
        self.rows: Slots
        self.static: StaticSteps | None = None
        sizes = (limits.rows, limits.length, limits.reuse)
        self._by_parts: list[Any] = []
        if capture is None and len(sizes_of_parts(limits.length)) > 1 and reason_against_parts(model) is None:
            self.rows, self._by_parts = PartedSlots(*sizes, stored), layers_by_parts(model)
        else:
            self.rows = rows = self._slots(*sizes, capture is not None, stored, self._layers)
            if capture is not None:
                self.static = StaticSteps(self._forward, rows, self._config, capture, limits.drafted)
        self.prompt = self._slots(1, limits.length, stored=stored, layers=self._layers)
        self.numbers: list[int] = []
        self.images: PromptImages | PromptSound | None = None
        self._seen: PromptInProgress | None = None  # the images of the prompt in prefill
        self._by_slot: list[_Slot] = []
        self._adapter = 0  # of the prompt in prefill
        self._planes = 0  # positions of time, height and width; 0: positions of tokens only
        self._computed: set[int] = set()  # the calls with a prompt in prefill
        self._is_passed_on = False

    def rest(self) -> None:
        """Clear the prompt after the last row has left. Former rows stay."""
        self.prompt.clear()
        self._computed, self.images, self._seen = set(), None, None

    def clear(self) -> None:
        """Remove all rows, including former rows, and the prompt, after a failed step.

        Drop the graphs too: memory may have run out, and all ranks have to capture the same later steps.
        """
        self.drop_graphs()
        self.rows.clear()
        self.numbers, self._by_slot = [], []
        if self._heads is not None:
            self._heads.clear()
        self.rest()

    def drop_graphs(self) -> None:
        """Drop the CUDA graphs. Later steps are captured again."""
        if self.static is not None:
            self.static.clear()

    def calls(self) -> set[int]:
        """Return the numbers of the calls in progress."""
        return {*self.numbers, *self._computed}

    def run(self, step: Step) -> Tensor | None:
        """Compute a step.

        Returns:
            The logits [B, V] after the newest token of each row, or after each prompt that joins. With drafts, the
            logits [B, L, V] after the newest token of each row and after each of its drafted tokens; later positions of
            rows with shorter drafts mean nothing. ``None`` if the prompt is not complete yet, or if the step computes
            nothing.

        Raises:
            ImagesError: on every rank, if a rank cannot encode the images of a prompt. The rows go on.
        """
        self._is_passed_on = False
        if self._heads is not None:
            self._heads.is_shared = False
        try:
            if step.settled:
                self.rows.settle(step.settled)
                if self._heads is not None:
                    self._heads.settle(step.settled)
            self.free(step.leaving)
            if step.begins:
                self._begin(step)
            if not step.shape[0] and not step.encodes:
                return None
            with self.model.generating(), fast_head(self.model, self._packed):
                if step.encodes:
                    with self._adapters.selected([self._adapter]):
                        self._encode_media(step)
                    return None
                if step.whole:
                    return self._prefill_whole(step)
                return self._prefill(step) if step.chunk else self._decode(step.tokens, step.drafts)
        except ImagesError:  # every rank knows of it
            raise
        except Exception:
            if not self._is_passed_on:
                self.skip(step)
            raise

    def _encode_media(self, step: Step) -> None:
        """Encode the images of a step. A collective. Raise `ImagesError` on every rank, if any rank raises."""
        assert self._seen is not None
        self._seen.encode(*step.images)

    def skip(self, step: Step) -> None:
        """Skip a failed step so that the other ranks go on. The next stage learns of the failure."""
        if step.encodes:
            with suppress(ImagesError):
                share_failure(self.model, RuntimeError("another step has failed"))
        if self._heads is not None:
            if step.drafts:
                with suppress(OtherStageError):
                    self._heads.share(step.drafts, RuntimeError("another step has failed"))
            self._heads.is_shared = False
        rows, length = self._shape(step)
        if rows and self._keeps_logits and self.model.pipeline is not None:
            self.model.pipeline.skip_generation_step(rows, length)

    def _shape(self, step: Step) -> tuple[int, int]:
        """Return the number of rows and positions that the decoder computes."""
        return step.shape

    def fork(self, slot: int, count: int) -> None:
        """Append copies of a row."""
        self.rows.fork(slot, count)
        self.numbers += [self.numbers[slot]] * count
        self._by_slot += [self._by_slot[slot]] * count
        if self._heads is not None:
            self._heads.fork(slot, count)

    def remember_step(self) -> None:
        """See `SlotCache.remember_step`."""
        if isinstance(self.rows, SlotCache):
            self.rows.remember_step()

    def free(self, leaving: Sequence[int]) -> None:
        """Remove the rows in the slots that a step frees."""
        for slot in leaving:
            self.rows.free(slot)
            self.numbers[slot], self._by_slot[slot] = self.numbers[-1], self._by_slot[-1]
            self.numbers.pop()
            self._by_slot.pop()
            if self._heads is not None:
                self._heads.free(slot)

    def _decode(self, tokens: Sequence[int], drafts: Sequence[list[int]]) -> Tensor:
        rows = self.rows
        assert len(tokens) == len(rows.lengths)
        if drafts and self._heads is not None:
            with self._heads.sharing(drafts):
                self._draft(self._heads, tokens, drafts)
        new = [[token, *draft] for token, draft in zip(tokens, drafts or [[]] * len(tokens), strict=True)]
        logits_BLV = self._replay(new)
        is_static = logits_BLV is not None
        if logits_BLV is None:
            logits_BLV = self._decode_eagerly(new)
        if drafts:  # the next step settles the cache
            return logits_BLV
        self._grow(is_static)
        return logits_BLV[:, -1]

    def _grow(self, is_static: bool = False) -> None:
        """Record that a step has added one position to each row."""
        rows = self.rows
        if is_static or not rows.lags:  # the step has written each position to the end of its row
            rows.grow(1)
        else:
            rows.settle([1] * len(rows.lengths))

    def _draft(self, heads: HeadStates, tokens: Sequence[int], drafts: Sequence[list[int]]) -> None:
        """Let the heads draft the tokens of a step, in place. They leave the rows as they were."""
        newest, hidden_BD, most = [*tokens], heads.stacked(), max(map(len, drafts))
        for place in range(most):
            made = self._arrange([[token] for token in newest])
            if made.order is not None:
                hidden_BD = hidden_BD[to_device(made.order, self._device)]
            given = self.rows.window, made.ids, made.positions, made.mask, hidden_BD[:, None]
            with self._decoding(made, 1):
                hidden_BD = made.by_slot(heads.compute(self.rows, *given)[:, 0])
                newest = heads.tokens(hidden_BD)
            for draft, token in zip(drafts, newest, strict=True):
                if place < len(draft):
                    draft[place] = token
            self._grow()
        self.rows.cut([most] * len(tokens))

    @contextmanager
    def _decoding(self, made: _Arranged, length: int) -> Iterator[None]:
        """Context of a forward of the rows, for ``length`` positions of each."""
        parts = nullcontext() if made.order is None else attending_by_parts(self._config, self._by_parts)
        tokens = computing_by_tokens(self._mixers, self.rows) if length > 1 and self._mixers else nullcontext()
        with parts, tokens, self._adapters.selected([slot.adapter for slot in made.slots], length):
            yield

    def _decode_eagerly(self, tokens: Sequence[list[int]]) -> Tensor:
        """Return the logits [B, L, V] after new tokens of each row. Shorter rows are padded on the right."""
        longest, heads = max(map(len, tokens)), self._heads
        made = self._arrange(tokens)
        options = {"next_sequence_length": longest, "attention_mask": made.mask}
        before_BD = None
        if heads is not None:
            before_BD = heads.stacked()
            before_BD = before_BD if made.order is None else before_BD[to_device(made.order, self._device)]
        with self._decoding(made, longest):
            logits_BV = self._forward(self.rows, made.ids, made.positions, options, keep=longest, before_BD=before_BD)
        if heads is not None:
            heads.note(made.by_slot(heads.seen_BLD), longest > 1)
        logits_BLV = logits_BV.unflatten(0, (-1, longest))
        return made.by_slot(logits_BLV) if len(logits_BV) else logits_BLV  # other stages than the last have no logits

    def _arrange(self, tokens: Sequence[list[int]]) -> _Arranged:
        """Return the inputs of a forward for new tokens of each row. Shorter rows are padded on the right."""
        rows = self.rows
        longest = max(map(len, tokens))
        rows.make_room(len(tokens), longest)
        # per row: its length, its tokens and padding, and their distances to its length; positions stay in the row
        padded, steps = tokens, [[0]] * len(tokens)
        if longest > 1:
            padded = [[*row, *row[-1:] * (longest - len(row))] for row in tokens]
            steps = [[min(place, len(row) - 1) for place in range(longest)] for row in tokens]
        values = [[length, *own, *more] for length, own, more in zip(rows.lengths, padded, steps, strict=True)]
        order, slots = rows.order, self._by_slot
        if order is not None:
            values, slots = [values[slot] for slot in order], [slots[slot] for slot in order]
        offsets = [slot.offsets for slot in slots]
        lengths_B1, ids_BL, steps_BL = to_device(values, self._device).split((1, longest, longest), 1)
        positions = lengths_B1 + steps_BL
        if any(map(any, offsets)):  # the first of four planes has the positions of tokens
            seen = positions + to_device(offsets, self._device).T[..., None]
            positions = torch.cat((positions.expand(self._planes - 3, -1, -1), seen))
        return _Arranged(ids_BL, positions, rows.mask(longest, lengths_B1[:, 0]), order, slots)

    def _replay(self, tokens: Sequence[list[int]]) -> Tensor | None:
        """Return the logits of a static step; ``None`` if decoding is eager, or if this step cannot be captured.

        Rows with adapters of their own are decoded eagerly: the captured steps have the active adapters.
        """
        if self.static is None or any(slot.adapter for slot in self._by_slot):
            return None
        try:
            return self.static.run(tokens)
        except CaptureError as error:
            self.static, self.eager_reason = None, f"a capture failed: {error}"
            warnings.warn(f"the running batch decodes without CUDA graphs from now on: {error}", stacklevel=2)
            return None

    def _prefill_whole(self, step: Step) -> Tensor:
        """Compute whole prompts as one batch, padded on the left as in `generate`."""
        prompts, tokens = step.whole, iter(step.chunk)
        self._computed = {prompt.number for prompt in prompts}
        longest = max(prompt.length for prompt in prompts)
        cache = self._cache_of_prompts(len(prompts), longest)
        # per row: the length of its padding, the padding, its tokens
        rows = [[n := longest - prompt.length] + [0] * n + list(islice(tokens, prompt.length)) for prompt in prompts]
        padding_B1, ids_BL = to_device(rows, self._device).split((1, longest), 1)
        positions_BL, mask_BL = torch.arange(longest, device=self._device).expand(len(prompts), -1), None
        if any(prompt.length < longest for prompt in prompts):
            positions_BL = positions_BL - padding_B1
            mask_BL = (positions_BL >= 0).long()
            positions_BL = positions_BL.clamp(min=0)
        options = {"is_first_iteration": True, "attention_mask": mask_BL}
        with self._adapters.selected([prompt.adapter for prompt in prompts], longest):
            logits_BV = self._forward(cache, ids_BL, positions_BL, options)
        for row, (number, length, displaced, adapter) in enumerate(prompts):
            self.rows.append(cache.layers, row, longest, length, displaced)
            self._join(number, adapter, row=row)
        return logits_BV

    def _cache_of_prompts(self, count: int, length: int) -> Cache:
        """Return an empty cache for prompts that are computed together. With states, all have this length."""
        if not self._layers and not has_index(self.model.config):
            return DynamicCache()
        cache = self._slots(count, length, layers=self._layers)
        cache.lengths = [0] * count
        cache.make_room(count, length)
        return cache

    def _join(self, number: int, adapter: int, offsets: tuple[int, ...] = NO_OFFSETS, row: int = 0) -> None:
        """Record a row in the slot after the last row.

        Args:
            row: index of its prompt in the last forward.
        """
        self.numbers.append(number)
        if self._heads is not None:
            self._heads.join(self._heads.seen_BLD[row, -1])
        self._by_slot.append(_Slot(offsets, adapter))
        self._computed = set()

    def _begin(self, step: Step) -> None:
        """Begin a prompt, with the keys and values of a cached prefix."""
        prompt = self.prompt
        prompt.clear()
        prompt.lengths = [0]
        if self._heads is not None:
            self._heads.prompt_1D = None
        if step.reused:
            prompt.begin_with(self.rows, step.source, step.reused)
        self._computed, self._adapter = {step.number}, step.adapter
        self._seen = PromptInProgress(self.model, self.images) if isinstance(self.images, PromptImages) else None
        self.images = None

    def _prefill(self, step: Step) -> Tensor | None:
        prompt, seen = self.prompt, self._seen
        (done,) = prompt.lengths
        stop = done + len(step.chunk)
        prompt.make_room(1, len(step.chunk))
        positions = torch.arange(done, stop, device=self._device)[None] if seen is None else seen.positions(done, stop)
        features = {} if seen is None else {**seen.take_features(), **seen.token_types(done, stop)}
        ids_BL = to_device([step.chunk], self._device)
        options, heads = {"is_first_iteration": done == 0}, self._heads
        before_1D = None if heads is None else heads.prompt_1D
        with self._adapters.selected([self._adapter]):
            logits_BV = self._forward(prompt, ids_BL, positions, options, features, before_BD=before_1D)
        if heads is not None:
            heads.prompt_1D = heads.seen_BLD[:, -1]
        prompt.grow(len(step.chunk))
        if not step.joins:
            return None
        self.rows.append(prompt.layers, 0, prompt.stop, prompt.lengths[0], step.displaced)
        self._planes = max(self._planes, len(positions) if positions.dim() == 3 else 0)
        self._join(step.number, self._adapter, NO_OFFSETS if seen is None else seen.offsets)
        self._seen = None
        prompt.clear()
        return logits_BV

    def _forward(
        self,
        cache: Cache,
        ids_BL: Tensor,
        positions: Tensor,
        options: dict[str, Any],
        features: Mapping[str, Any] = MappingProxyType({}),
        keep: int = 1,
        before_BD: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the last positions of each row, [B * ``keep``, V]. Append keys and values to the cache.

        Args:
            positions: [B, L], or [3 or 4, B, L] for images with positions of height and width.
            features: of the images among the tokens, and kinds of tokens, as arguments of the model.
            before_BD: the hidden states before these positions, for MTP heads.
        """
        model, argument = self.model, cache
        if isinstance(cache, SlotCache):
            cache.show_states()
            argument = cache.argument
        given: dict[str, Any] = {"use_cache": True, self._cache_name: argument, "attention_mask": None, **options}
        if self._takes_positions:
            given["position_ids"] = positions
        inputs = model.prepare_inputs_for_generation(ids_BL, **given)
        if self._can_keep_few:  # Bamba and its kin replace it by a setting of their configuration
            inputs["logits_to_keep"] = keep
        if inputs.get("position_ids", positions) is None:  # EXAONE 4.5 counts the whole cache, with free slots
            inputs["position_ids"] = positions
        following: Any = nullcontext()
        if self._heads is not None:
            window = cache.get_seq_length()
            following = self._heads.following(
                argument, window, ids_BL, positions, options.get("attention_mask"), before_BD
            )
        computing = cache.computing(model) if isinstance(cache, SlotCache) else nullcontext()
        with following, computing, self._positions_of_rows(positions):
            output = self._output({**inputs, **features})
        if isinstance(cache, SlotCache):
            cache.take(output)
        logits_BLV: Tensor = output.logits
        return logits_BLV[:, -keep:].flatten(0, 1)

    def _positions_of_rows(self, positions_BL: Tensor) -> AbstractContextManager[None]:
        """Context in which the decoder looks up these positions, if its forward does not take them."""
        return nullcontext() if self._position_table is None else looking_up(self._position_table, positions_BL)

    def _output(self, inputs: Mapping[str, Any]) -> Any:
        """Return the output of the model."""
        keeps = self._keeps_logits and self.model.pipeline is not None
        self._is_passed_on = True  # if the model raises, it tells the other stages itself
        with self.model.pipeline.keeping_logits() if keeps else nullcontext():
            return self.model(**inputs, return_dict=True)

    def reserve(self) -> int:
        """Allocate the whole cache, and return its bytes. A collective.

        Raises:
            MemoryError: there is too little memory.
        """
        with self.model.generating():
            probe = self._probe()
        try:
            self._allocate(probe)
        except (RuntimeError, MemoryError) as error:
            rows, columns = self.rows.most_rows, self.rows.most_columns
            raise MemoryError(
                f"no memory for a running batch of {rows} rows of {columns} tokens: {error}. Use a smaller "
                "max_batch_size or max_batch_length"
            ) from error
        return self.rows.bytes_held + self.prompt.bytes_held

    def _probe(self) -> Any:
        """Return a cache with the shapes of the layers, which a forward shows."""
        probe = self._slots(1, 1, layers=self._layers)
        probe.lengths = [0]
        probe.make_room(1, 1)
        zero_BL = to_device([[0]], self._device)
        self._forward(probe, zero_BL, zero_BL, {"is_first_iteration": True})
        probe.grow(1)
        return probe

    def _allocate(self, probe: Any) -> None:
        """Allocate all caches."""
        self.prompt.reserve(probe)
        if isinstance(self.rows, PartedSlots):  # what is reserved for all rows is not shared
            self.rows = self.rows.reserved(probe)
        else:
            self.rows.reserve(probe)
