"""Dynamic batching: calls of `generate` that wait at the same time with equal settings are computed as one batch."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oslo_models.deploy.cancellation import CallCancelled, Cancellation
from oslo_models.deploy.engine import Engine
from oslo_models.deploy.errors import EngineError, raised_by_workers


@dataclass(eq=False)
class _QueuedCall:
    """A call that may share a batch with others that have the same ``key``."""

    key: str
    ids: Tensor  # [B, L], like the mask
    mask: Tensor
    kwargs: dict[str, Any]
    settings: Mapping[str, Any]
    generation_config: Any
    cancellation: Cancellation = field(default_factory=Cancellation)
    done: bool = False
    result: Any = None
    error: BaseException | None = None


class Batcher:
    """Batches the calls of several threads.

    Only greedy decoding from token ids, with nothing but numbers as settings, is batched: there the tokens of a row do
    not depend on the other rows. The first call that arrives while nothing is computed becomes the leader: it waits for
    others if the last batch had several, computes the batch, and hands out the results. If the batch raises, each call
    is computed separately. A call that is cancelled leaves the queue; a batch is given up when all its calls are
    cancelled.

    Args:
        config: of the model.
        max_batch_size: rows of a batch at most; 1 disables batching.
        batch_wait_ms: milliseconds that a leader waits for others.
    """

    def __init__(self, engine: Engine, config: Any, max_batch_size: int, batch_wait_ms: float) -> None:
        self.engine, self.config = engine, config
        self.size, self.wait = max_batch_size, batch_wait_ms / 1000
        self._waiting: list[_QueuedCall] = []
        self._lock = threading.Condition()  # notified when a leader has ended, and when a call is cancelled
        self._leader: _QueuedCall | None = None
        self._enough = threading.Event()
        self._inside = 0  # calls that wait or are being computed
        self._crowded = False  # whether there were several calls when the last batch was formed

    def generate(self, kwargs: dict[str, Any], options: Mapping[str, Any], defaults: Any) -> Any:
        """One call; see `Deployment.generate`. ``defaults``: the current generation config of the model."""
        call = self._batchable(kwargs, options, defaults) if self.size > 1 else None
        if call is None:
            return self.engine.call("generate", (), kwargs, **options)
        with self._lock:
            self._inside += 1
            self._waiting.append(call)
            if self._rows() >= self.size:
                self._enough.set()
        try:
            with call.cancellation.observed(self._notify):
                self._compute_or_wait(call)
        finally:
            with self._lock:
                self._inside -= 1
                if call in self._waiting:  # interrupted or cancelled
                    self._waiting.remove(call)
        if call.error is not None:
            raise call.error
        return call.result

    def _notify(self) -> None:
        with self._lock:
            self._lock.notify_all()

    def _compute_or_wait(self, call: _QueuedCall) -> None:
        """Return when the call is done: computed here, as the leader of all that wait, or by another thread."""
        try:
            with self._lock:
                while self._leader is not None and not call.done and not call.cancellation.cancelled:
                    self._lock.wait()
                if not call.done and not call.cancellation.cancelled:
                    self._leader = call
            if self._leader is call:
                self._lead(call)
        finally:
            with self._lock:
                if self._leader is call:
                    self._leader = None
                    self._lock.notify_all()
        if not call.done and call.cancellation.cancelled:
            raise CallCancelled("generate was cancelled")

    def _batchable(self, kwargs: dict[str, Any], options: Mapping[str, Any], defaults: Any) -> _QueuedCall | None:
        """The call in the form in which it can be batched, or ``None`` if it cannot."""
        if any(options[name] is not None for name in ("streamer", "timeout", "seed")):
            return None
        rest = dict(kwargs)
        ids, mask = rest.pop("input_ids", rest.pop("inputs", None)), rest.pop("attention_mask", None)
        if not isinstance(ids, Tensor) or ids.dim() != 2 or ids.is_floating_point() or len(ids) > self.size:
            return None
        if not all(isinstance(value, (int, float, bool, type(None))) for value in rest.values()):
            return None
        settings = {**vars(defaults), **rest}
        if settings["do_sample"] or (settings["num_beams"] or 1) > 1 or settings["return_dict_in_generate"]:
            return None
        if mask is None or rest.get("max_new_tokens") is None or self.config.is_encoder_decoder:
            return None
        key = repr((sorted(rest.items()), defaults))
        call = _QueuedCall(key, ids.cpu(), mask.cpu(), rest, settings, options["generation_config"])
        call.cancellation = options.get("cancellation") or call.cancellation
        return call

    def _lead(self, call: _QueuedCall) -> None:
        if self._rows() < self.size and (self._crowded or self._inside > 1):
            self._enough.wait(self.wait)
        with self._lock:
            self._enough.clear()
            self._crowded = self._inside > 1
            batch, rows = [call], len(call.ids)
            for other in self._waiting:
                if other is not call and other.key == call.key and rows + len(other.ids) <= self.size:
                    batch.append(other)
                    rows += len(other.ids)
            for member in batch:
                self._waiting.remove(member)
        try:
            self._finish(batch)
        finally:
            with self._lock:  # if the leader was interrupted, another thread becomes the leader of the others
                left = [member for member in batch if not member.done and not member.cancellation.cancelled]
                self._waiting[:0] = [member for member in left if member is not call]

    def _finish(self, batch: list[_QueuedCall]) -> None:
        try:
            self._compute(batch)
        except Exception as error:
            if not raised_by_workers(error):  # by a signal handler or a cancellation: it concerns the leader only
                raise
            if len(batch) > 1 and not isinstance(error, EngineError):
                for member in batch:
                    self._finish([member])
                return
            for member in batch:
                member.error = error
        for member in batch:
            member.done = True

    def _rows(self) -> int:
        return sum(len(call.ids) for call in self._waiting)

    def _compute(self, batch: list[_QueuedCall]) -> None:
        first = batch[0]
        pad, ends = first.settings["pad_token_id"], first.settings["eos_token_id"]
        length = max(call.ids.shape[1] for call in batch)
        ids_BL = torch.cat([_pad_left(call.ids, length, pad or 0) for call in batch])
        mask_BL = torch.cat([_pad_left(call.mask, length, 0) for call in batch])
        kwargs = {"input_ids": ids_BL, "attention_mask": mask_BL, **first.kwargs}
        everybody = Cancellation()

        def give_up() -> None:
            if all(call.cancellation.cancelled for call in batch):
                everybody.cancel()

        with ExitStack() as observed:
            for call in batch:
                observed.enter_context(call.cancellation.observed(give_up))
            options = {"generation_config": first.generation_config, "cancellation": everybody}
            out_BL = self.engine.call("generate", (), kwargs, **options)
        parts = out_BL[:, length:].split([len(call.ids) for call in batch])
        for call, new_BL in zip(batch, parts, strict=True):
            call.result = torch.cat((call.ids, new_BL[:, : _own_length(new_BL, ends)]), 1)


def _own_length(new_BL: Tensor, ends: Any) -> int:
    """How many new tokens the rows would have if computed separately: until the last of them has ended."""
    if ends is None:
        return new_BL.shape[1]
    ended_BL = torch.isin(new_BL, torch.as_tensor(ends))
    count_B = torch.where(ended_BL.any(1), ended_BL.int().argmax(1) + 1, new_BL.shape[1])
    return int(count_B.max())


def _pad_left(x_BL: Tensor, length: int, value: int) -> Tensor:
    return torch.nn.functional.pad(x_BL, (length - x_BL.shape[1], 0), value=value)
