"""Lets the calls of one adapter at a time reach the workers, which compute with one set of weights in a step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from oslo_models.deploy.cancellation import CallCancelled, Cancellation

_UNKNOWN = object()


@dataclass(eq=False)
class _Waiting:
    """A call before its turn.

    Attributes:
        woken: it may begin, or nobody waits for its answer any more.
    """

    adapter: str | None
    woken: threading.Event = field(default_factory=threading.Event)
    begun: bool = False


class AdapterTurns:
    """The adapters of a deployed model take turns; the model without adapters is one of them.

    A turn belongs to the adapter of the call that has waited longest, and begins once the calls of the turn before have
    ended. All calls of its adapter that wait then begin together. Later ones join them only while no other adapter is
    waited for: each call waits for at most one turn of each other adapter.

    A call that was cancelled has ended here before its rows have left the running batch. The workers change adapters
    only when the batch is empty, so that they do not compute these rows with another adapter either.

    Args:
        model: a deployed model that has loaded the adapters. Nothing else may switch them.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._lock, self._switching = threading.Lock(), threading.Lock()
        self._waiting: list[_Waiting] = []
        self._running = 0
        self._turn: str | None = None
        self._active: Any = _UNKNOWN

    @contextmanager
    def turn_of(self, adapter: str | None, cancellation: Cancellation) -> Iterator[None]:
        """Within the block, the model computes with this adapter; ``None``: without any. Waits for that.

        Raises:
            CallCancelled: by ``cancellation``, before the turn came.
            EngineError: the workers have died, so that they could not be switched.
        """
        self._wait(_Waiting(adapter), cancellation)
        try:
            self._switch_to(adapter)
            yield
        finally:
            with self._lock:
                self._running -= 1
                self._admit()

    def _wait(self, call: _Waiting, cancellation: Cancellation) -> None:
        with self._lock:
            self._waiting.append(call)
            self._admit()
        with cancellation.observed(call.woken.set):
            call.woken.wait()
        with self._lock:
            if not call.begun:
                self._waiting.remove(call)
                self._admit()
                raise CallCancelled("nobody waits for the answer")

    def _admit(self) -> None:
        """Let calls begin, with the lock held."""
        if not self._waiting:
            return
        if not self._running:
            self._turn = self._waiting[0].adapter
        elif any(call.adapter != self._turn for call in self._waiting):
            return
        for call in [call for call in self._waiting if call.adapter == self._turn]:
            self._waiting.remove(call)
            self._running += 1
            call.begun = True
            call.woken.set()

    def _switch_to(self, adapter: str | None) -> None:
        """Switch the workers, unless another call of this turn has."""
        with self._switching:
            if self._active == adapter:
                return
            self._active = _UNKNOWN  # if this fails, the next call tries again
            if adapter is None:
                self._model.disable_adapters()
            else:
                self._model.set_adapter(adapter)
                self._model.enable_adapters()
            self._active = adapter
