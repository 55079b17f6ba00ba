"""Ranks that are threads of this process: what stands in for a process group where a notebook trains on many devices.

They take turns: one rank runs at a time, and hands the turn on where it waits for others in a collective. So nothing is
written and read at once, what is computed does not depend on how fast threads are, and a random generator that they
share (torch's on the CPU, numpy's) is that of each rank while its turn lasts. Devices overlap none the less: what is
launched on one goes on while the next rank launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from copy import copy
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack

T = TypeVar("T")


class ThreadGroup:
    """The ranks of one model. The turn is a rank's and not a thread's: on a GPU, autograd runs in one of its own.

    Attributes:
        devices: where the ranks compute, by rank.
        has_numpy: whether what they compute draws from numpy's generator.
    """

    def __init__(self, devices: Sequence[torch.device], has_numpy: bool = False) -> None:
        self.devices, self.size, self.has_numpy = tuple(devices), len(devices), has_numpy
        self._called = threading.RLock()
        self._turns = [threading.Semaphore(0) for _ in devices]
        self._threads = ThreadPoolExecutor(max(self.size - 1, 1), "oslo-rank")  # starts none before it needs one
        self._error: BaseException | None = None
        self._running: set[int] = set()
        self._arrived: dict[int, Any] = {}
        self._results: list[Any] = [None] * self.size
        self._random: list[Any] = [None] * self.size

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadGroup:
        return self  # a copied model lives on the same devices

    def run(self, task: Callable[[int], T]) -> list[T]:
        """What ``task`` returns for each rank, run in a thread of its own; that of rank 0 in the thread that calls.

        Raises:
            BaseException: what the first rank that failed raised. The others have ended then, too.
            RuntimeError: rank 0 calls it while it takes part in another.
        """
        with self._called:
            if self._running:
                raise RuntimeError("a model of tensor_parallel cannot be called from inside itself, as from a hook")
            self._error, self._arrived, self._running = None, {}, set(range(self.size))
            self._random = [self._random_state()] * self.size
            self._share_seed()
            results: list[Any] = [None] * self.size
            around = _Surroundings(self.devices[0].type)
            futures: list[Future[None]] = [
                self._threads.submit(copy_context().run, self._enter, rank, task, results, around)
                for rank in range(1, self.size)
            ]
            self._take_part(0, task, results)
            self._until(partial(wait, futures))
            self._set_random_state(self._random[0])
            self._results = [None] * self.size
            error, self._error = self._error, None
        if error is not None:
            raise error
        return results

    def all_reduce(self, rank: int, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place, in the order of the ranks."""
        self._meet(rank, x, partial(_reduce, op))

    def all_gather(self, rank: int, value: T) -> list[T]:
        """What every rank passed. Tensors are copies on the device of this rank, which others may share."""
        return self._meet(rank, value, self._gather)

    def _gather(self, values: list[Any]) -> list[list[Any]]:
        def on(device: torch.device) -> list[Any]:
            return [value.to(device, copy=True) if isinstance(value, Tensor) else value for value in values]

        known = {device: on(device) for device in set(self.devices)}
        return [known[device] for device in self.devices]

    # Turns ------------------------------------------------------------------------------------------------------------

    def _enter(self, rank: int, task: Callable[[int], Any], results: list[Any], around: _Surroundings) -> None:
        def surrounded(rank: int) -> Any:
            with around.here():
                return task(rank)

        self._wait(rank)
        self._take_part(rank, surrounded, results)

    def _take_part(self, rank: int, task: Callable[[int], Any], results: list[Any]) -> None:
        try:
            if self._error is None:
                device = self.devices[rank]
                with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                    results[rank] = task(rank)
        except BaseException as error:  # noqa: BLE001  the thread that called raises it
            self._error = self._error or error
        self._running.discard(rank)
        self._hand_on(rank)

    def _meet(self, rank: int, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """This rank's part of what ``combine`` makes of the values of all, which the last rank to arrive calls."""
        if self._error is not None:
            raise _Abandoned from self._error
        self._arrived[rank] = value
        if len(self._arrived) == self.size:
            values, self._arrived = [self._arrived[other] for other in range(self.size)], {}
            with torch.no_grad():
                self._results = combine(values)
        elif self._running == self._arrived.keys():
            raise RuntimeError(f"rank {rank} waits in a collective for ranks that have ended")
        else:
            self._hand_on(rank)
            self._wait(rank)
            if self._error is not None:
                raise _Abandoned from self._error
        result, self._results[rank] = self._results[rank], None
        return result

    def _hand_on(self, rank: int) -> None:
        """Give the turn to the next rank that can go on."""
        self._random[rank] = self._random_state()
        others = [
            other % self.size for other in range(rank + 1, rank + self.size) if other % self.size in self._running
        ]
        able = [other for other in others if other not in self._arrived]
        if others and not able:
            self._error = self._error or RuntimeError(f"rank {rank} ended while {others} waited for it in a collective")
        if others:
            self._turns[others[0] if self._error else able[0]].release()

    def _wait(self, rank: int) -> None:
        self._until(self._turns[rank].acquire)
        self._set_random_state(self._random[rank])

    def _until(self, wait: Callable[[], Any]) -> None:
        """Wait, and even if interrupted: without the turn nothing can be done but to let all ranks end."""
        while True:
            try:
                wait()
                return
            except BaseException as error:  # noqa: BLE001  KeyboardInterrupt
                self._error = self._error or error

    # Random states ----------------------------------------------------------------------------------------------------

    def _share_seed(self) -> None:
        """Let each GPU draw what the first will draw; ranks on the CPU share a generator."""
        if self.devices[0].type == "cuda":
            first, *others = (torch.cuda.default_generators[device.index] for device in self.devices)
            for generator in others:
                generator.set_state(first.get_state())

    def _random_state(self) -> Any:
        return torch.default_generator.get_state(), np.random.get_state() if self.has_numpy else None

    def _set_random_state(self, state: Any) -> None:
        torch.default_generator.set_state(state[0])
        if self.has_numpy:
            np.random.set_state(state[1])


class _Abandoned(Exception):
    """Ends a rank that waits for one that failed."""


class _Surroundings:
    """What torch keeps for each thread, as it is in the one that asks."""

    def __init__(self, device_type: str) -> None:
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = [kind for kind in {"cpu", device_type} if torch.is_autocast_enabled(kind)]
        self.autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds]
        self.modes = _get_current_function_mode_stack()

    @contextmanager
    def here(self) -> Iterator[None]:
        """The same in this thread."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), ExitStack() as stack:
            for kind, dtype, caches in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            for mode in self.modes:
                stack.enter_context(copy(mode))  # that of `torch.device` remembers what was before it
            yield


def _reduce(op: dist.ReduceOp.RedOpType, parts: list[Tensor]) -> list[None]:
    total, *others = parts
    for part in others:
        if op == dist.ReduceOp.MAX:
            torch.maximum(total, part.to(total.device), out=total)
        else:
            total += part.to(total.device)
    for part in others:
        part.copy_(total)
    return [None] * len(parts)
