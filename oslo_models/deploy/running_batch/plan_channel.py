"""Sends the steps of the running batch from the leader to the followers.

Ranks on one host share memory. A step arrives within microseconds, because the followers poll the memory at first. On
several hosts, the step is broadcast through the process group.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from oslo_models.deploy.running_batch.step import Step

SPIN_SECONDS = 0.002
"""Seconds that a rank polls without sleeping. Longer than the leader takes to draw tokens."""
_PAUSES = (0.00005, 0.001)
"""First and longest pause in seconds between two polls, once the rank sleeps."""
_WORD = 8


class PlanChannel(Protocol):
    """Channel from the leader to the followers."""

    def publish(self, step: Step) -> None:
        """On the leader: send the step. Returns before the followers have read it."""

    def receive(self) -> Step:
        """On a follower: return the next step."""

    def settles(self, seconds: float) -> bool:
        """On the leader: return whether all followers read the last step within ``seconds``."""


class NoFollowers:
    """The channel of a model on one rank."""

    def publish(self, step: Step) -> None:
        pass

    def receive(self) -> Step:
        raise AssertionError("the only rank is the leader")

    def settles(self, seconds: float) -> bool:
        return True


class SharedMemoryChannel:
    """A memory-mapped file that all ranks of one host share: the last step number that each rank read, and the steps.

    Args:
        path: of the file, in a directory that only this user can enter.
        size: bytes of the largest step.
        ahead: number of steps that the leader may publish before the followers have read the first of them.
    """

    def __init__(self, path: Path, rank: int, leader: int, ranks: int, size: int, ahead: int = 1) -> None:
        size = -(-size // _WORD) * _WORD
        whole = (ranks + 2 * ahead) * _WORD + ahead * size
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, whole)  # safe on every rank: adds zeros, or keeps the data of an earlier rank
            memory = memoryview(mmap.mmap(descriptor, whole))
        finally:
            os.close(descriptor)
        words, data = memory[: -size * ahead].cast("q"), memory[-size * ahead :]
        self._numbers = words[:ranks]
        # per step: its number and length, and its bytes
        self._headings = [words[ranks + 2 * i : ranks + 2 * i + 2] for i in range(ahead)]
        self._data = [data[i * size : (i + 1) * size] for i in range(ahead)]
        self._rank, self._followers = rank, [other for other in range(ranks) if other != leader]
        self._number = 0

    def publish(self, step: Step) -> None:
        self._number += 1
        index = self._number % len(self._data)
        _wait_for(partial(self._all_have_read, self._number - len(self._data)), float("inf"))
        data = step.encode()
        if len(data) > len(self._data[index]):
            self._number -= 1
            raise ValueError(f"a step of {len(data)} bytes exceeds the {len(self._data[index])} bytes of the channel")
        self._data[index][: len(data)] = data
        self._headings[index][1] = len(data)
        self._headings[index][0] = self._number

    def receive(self) -> Step:
        self._number += 1
        step: Step | None = None
        index = self._number % len(self._data)

        def arrived() -> bool:
            nonlocal step
            number, length = self._headings[index]
            if number != self._number:
                return False
            # Processors other than x86 may show the number before the data. The checksum detects this.
            step = Step.decode(bytes(self._data[index][:length]))
            return step is not None

        _wait_for(arrived, float("inf"))
        self._numbers[self._rank] = self._number
        assert step is not None
        return step

    def settles(self, seconds: float) -> bool:
        return _wait_for(partial(self._all_have_read, self._number), seconds)

    def _all_have_read(self, number: int) -> bool:
        return all(self._numbers[rank] >= number for rank in self._followers)


class BroadcastChannel:
    """Channel for ranks on several hosts.

    Args:
        axis: of all ranks.
        leader: its position on the axis.
    """

    def __init__(self, axis: Any, leader: int) -> None:
        self._axis, self._leader = axis, leader

    def publish(self, step: Step) -> None:
        self._broadcast(step.encode())

    def receive(self) -> Step:
        step = Step.decode(self._broadcast(None))
        assert step is not None
        return step

    def _broadcast(self, data: bytes | None) -> bytes:
        from oslo_models.distributed.object_exchange import broadcast_object

        return broadcast_object(self._axis, data, self._leader)

    def settles(self, seconds: float) -> bool:
        return False  # a collective that failed on some ranks looks like a slow one


def _wait_for(holds: Callable[[], bool], seconds: float) -> bool:
    """Wait until ``holds()`` is true, for at most ``seconds``. Return whether it is."""
    if holds():
        return True
    began, pause = time.monotonic(), _PAUSES[0]
    while not holds():
        waited = time.monotonic() - began
        if waited > seconds:
            return False
        if waited > SPIN_SECONDS:
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        else:
            os.sched_yield()
    return True
