"""A call in flight, which the messages of the workers complete."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterable
from typing import Any

import torch

from oslo_models.deploy.errors import exception_from
from oslo_models.deploy.messages import Failure, Reply, Streamed

GRACE = 3.0
"""Seconds that the other ranks get to answer after one has raised. They may hang in a collective."""


class PendingCall:
    """One call, shared by the waiting thread and the receiving thread.

    Args:
        ranks: the ranks that answer the call. Other ranks may report a failure.

    Attributes:
        events: queue on which the caller waits: ``("stream", value)``, ``("return", results by rank)`` or
            ``("raise", exception)``.
        unanswered: the ranks that have neither returned nor raised.
        failure: the first failure, with its rank. A primary failure replaces a secondary one.
        deadline: when to give up on unanswered ranks, in seconds of ``time.monotonic``.
    """

    def __init__(self, number: int, ranks: Iterable[int]) -> None:
        self.number = number
        self.events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.unanswered = set(ranks)
        self.failure: tuple[int, Failure] | None = None
        self.deadline = float("inf")
        self._results: dict[int, Any] = {}

    def add(self, rank: int, message: Streamed | Reply | Failure) -> bool:
        """Record a message of a worker; return whether all ranks have answered."""
        if isinstance(message, Streamed):
            self.events.put(("stream", message.value))
            return False
        self.unanswered.discard(rank)
        if isinstance(message, Failure):
            if self.failure is None or self.failure[1].secondary > message.secondary:
                self.failure = rank, message
            self.deadline = min(self.deadline, time.monotonic() + GRACE)
        else:
            self._results[rank] = message.result
        return not self.unanswered

    def stream(self, value: Any) -> None:
        """Pass a value from the leader of the running batch on to the streamer; see `Stepped`."""
        if isinstance(value, (int, list)):
            value = torch.tensor([value] if isinstance(value, int) else value)
        self.events.put(("stream", value))

    def complete(self, pids: list[int]) -> None:
        """Wake the caller: return the results, or raise the failure.

        Args:
            pids: the process ids of the workers, by rank, for the message of the exception.
        """
        if self.failure is not None:
            self.fail(pids)
        else:
            self.events.put(("return", [self._results[rank] for rank in sorted(self._results)]))

    def fail(self, pids: list[int], when: str = "") -> None:
        """Wake the caller with the exception of the rank that failed."""
        assert self.failure is not None
        rank, failure = self.failure
        self.events.put(("raise", exception_from(failure, rank, pids[rank], when)))
