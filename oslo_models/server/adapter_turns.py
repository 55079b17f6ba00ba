"""Lets the calls of one adapter at a time reach the workers, for adapters that a step cannot mix (DoRA, of experts)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from oslo_models.deploy.cancellation import CallCancelled, Cancellation

if TYPE_CHECKING:
    from oslo_models.deploy import Deployment

_UNKNOWN = object()


@dataclass(eq=False)
class _Waiting:
    """A call before its turn.

    Attributes:
        woken: set when the call may begin, or when it was cancelled.
    """

    adapter: str | None
    woken: threading.Event = field(default_factory=threading.Event)
    begun: bool = False


class AdapterTurns:
    """Turns of the adapters of a deployed model. The model without an adapter takes turns like an adapter.

    A turn belongs to the adapter of the call that has waited longest. It begins after the last call of the previous
    turn. All waiting calls of this adapter begin together. Later calls join the turn only while no other adapter has
    waiting calls. So each call waits for at most one turn of each other adapter.

    A cancelled call ends here before its rows leave the running batch. The workers switch adapters only when the batch
    is empty, so these rows are never computed with another adapter.

    Args:
        model: a deployed model that has loaded the adapters. Nothing else may switch them.
    """

    def __init__(self, model: Deployment) -> None:
        self._model = model
        self._lock, self._switching = threading.Lock(), threading.Lock()
        self._waiting: list[_Waiting] = []
        self._running = 0
        self._turn: str | None = None
        self._active: Any = _UNKNOWN

    @contextmanager
    def turn_of(self, adapter: str | None, cancellation: Cancellation) -> Iterator[None]:
        """Wait for a turn. Inside the block, the model computes with this adapter; ``None`` for no adapter.

        Raises:
            CallCancelled: ``cancellation`` was triggered before the turn.
            EngineError: the workers died and could not switch adapters.
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
                raise CallCancelled("the client has left")

    def _admit(self) -> None:
        """Start the next calls. The caller holds the lock."""
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
        """Switch the workers to this adapter, unless another call of this turn has done so."""
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
