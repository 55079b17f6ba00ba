"""Computes the steps of the running batch on one rank: transformers' forward with the batch's own cache.

Legend:
    B: rows.
    L: positions.
    V: vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.running_batch.head_product import fast_head
from oslo_models.deploy.running_batch.limits import BatchLimits
from oslo_models.deploy.running_batch.slot_cache import SlotCache
from oslo_models.deploy.running_batch.step import Step


class StepRunner:
    """The rows of the batch as one rank holds them.

    A prompt is computed in a cache of its own, chunk by chunk, while the rows go on; then its keys and values are
    copied into a slot.

    Args:
        keeps_logits: only the last pipeline stage gets logits; the other stages get none, [0, V].

    Attributes:
        numbers: of the calls that the rows and, last, the prompt are from.
    """

    def __init__(self, model: Any, limits: BatchLimits, keeps_logits: bool = False) -> None:
        self.model, self._keeps_logits = model, keeps_logits
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.rows = SlotCache(limits.rows, limits.length, keeps=limits.reuse)
        self.prompt = SlotCache(1, limits.length)
        self.numbers: list[int] = []
        self._prompt_number: int | None = None

    def rest(self, leaving: Sequence[int]) -> None:
        """The last rows leave, and the prompt if it was dropped; former rows stay."""
        self.free(leaving)
        self.prompt.clear()
        self._prompt_number = None

    def clear(self) -> None:
        """Remove all rows, former ones too, and the prompt."""
        self.rows.clear()
        self.prompt.clear()
        self.numbers, self._prompt_number = [], None

    def calls(self) -> set[int]:
        """The numbers of the calls that are being computed."""
        return {*self.numbers, *(() if self._prompt_number is None else (self._prompt_number,))}

    def run(self, step: Step) -> Tensor | None:
        """Compute a step.

        Returns:
            The logits after the newest token of each row, [B, V], or those after a prompt whose row joins, [1, V];
            ``None`` if more of the prompt is to come.
        """
        self.free(step.leaving)
        with self.model.generating(), fast_head(self.model):
            if step.chunk:
                return self._prefill(step)
            return self._decode(step.tokens) if step.tokens else None

    def free(self, leaving: Sequence[int]) -> None:
        """Remove the rows that a step says."""
        for slot in leaving:
            self.rows.free(slot)
            self.numbers[slot] = self.numbers[-1]
            self.numbers.pop()

    def _decode(self, tokens: Sequence[int]) -> Tensor:
        rows = self.rows
        assert len(tokens) == len(rows.lengths)
        rows.make_room(len(tokens), 1)
        position_ids_BL = torch.tensor(rows.lengths)[:, None]
        return self._forward(rows, torch.tensor(tokens)[:, None], position_ids_BL, {"next_sequence_length": 1})

    def _prefill(self, step: Step) -> Tensor | None:
        prompt = self.prompt
        if step.begins:
            prompt.clear()
            prompt.lengths = [0]
            if step.reused:
                prompt.begin_with(self.rows, step.source, step.reused)
            self._prompt_number = step.number
        (done,) = prompt.lengths
        prompt.make_room(1, len(step.chunk))
        position_ids_BL = torch.arange(done, done + len(step.chunk))[None]
        options = {"is_first_iteration": done == 0}
        logits_BV = self._forward(prompt, torch.tensor([step.chunk]), position_ids_BL, options)
        if not step.joins:
            return None
        self.rows.append(prompt, step.displaced)
        self.numbers.append(step.number)
        prompt.clear()
        self._prompt_number = None
        return logits_BV

    def _forward(self, cache: SlotCache, ids_BL: Tensor, position_ids_BL: Tensor, options: dict[str, Any]) -> Tensor:
        """The logits of the last position of each row; the cache gets the positions."""
        model, device = self.model, self.model.device
        mask_BL = cache.mask(ids_BL.shape[1])
        given: dict[str, Any] = {"use_cache": True, "past_key_values": cache, **options}
        given["attention_mask"] = None if mask_BL is None else mask_BL.to(device)
        if self._takes_positions:
            given["position_ids"] = position_ids_BL.to(device)
        if model._supports_logits_to_keep():
            given["logits_to_keep"] = 1
        inputs = model.prepare_inputs_for_generation(ids_BL.to(device), **given)
        keeps = self._keeps_logits and model.pipeline is not None
        with model.pipeline.keeping_logits() if keeps else nullcontext():
            logits_BLV = model(**inputs, return_dict=True).logits
        cache.grow(ids_BL.shape[1])
        return logits_BLV[:, -1:].flatten(0, 1)

    def reserve(self) -> int:
        """Allocate the whole cache, and return its bytes. A collective.

        Raises:
            MemoryError: there is too little memory.
        """
        probe = SlotCache(1, 1)  # a forward shows the shapes
        probe.lengths = [0]
        probe.make_room(1, 1)
        with self.model.generating():
            self._forward(probe, torch.tensor([[0]]), torch.tensor([[0]]), {"is_first_iteration": True})
        try:
            self.rows.reserve(probe)
            self.prompt.reserve(probe)
        except (RuntimeError, MemoryError) as error:
            rows, columns = self.rows.most_rows, self.rows.most_columns
            raise MemoryError(
                f"no memory for a running batch of {rows} rows of {columns} tokens: {error}. Use a smaller "
                "max_batch_size or max_batch_length"
            ) from error
        return self.rows.bytes_held + self.prompt.bytes_held
