"""`ThreadGroup`: runs ranks as threads of one process, for notebooks that train on several devices.

One rank runs at a time. It passes the turn on when it waits in a collective. So there are no data races, results do not
depend on thread timing, and each rank has a separate state of the generators shared by threads (torch's on the CPU,
numpy's). Devices still overlap: kernels on one device keep running while the next rank launches its kernels.
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
    """Ranks of one model. A turn belongs to a rank, not to a thread: on a GPU, autograd uses separate threads.

    Attributes:
        devices: the device of each rank.
        has_numpy: whether the model draws from numpy's generator.
    """

    def __init__(self, devices: Sequence[torch.device], has_numpy: bool = False) -> None:
        self.devices, self.size, self.has_numpy = tuple(devices), len(devices), has_numpy
        self._call_lock = threading.RLock()
        self._turns = [threading.Semaphore(0) for _ in devices]
        self._threads = ThreadPoolExecutor(max(self.size - 1, 1), "oslo-rank")  # starts threads on demand
        self._error: BaseException | None = None
        self._running: set[int] = set()
        self._contributions: dict[int, Any] = {}
        self._contributing_streams: dict[int, torch.cuda.Stream] = {}
        self._results: list[Any] = [None] * self.size
        self._rng_states: list[Any] = [None] * self.size

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadGroup:
        return self  # a copied model is on the same devices

    def run(self, task: Callable[[int], T]) -> list[T]:
        """Run ``task(rank)`` on every rank and return the results by rank. Rank 0 runs in the calling thread.

        Raises:
            BaseException: the exception of the first failed rank, after all ranks have ended.
            RuntimeError: called from inside another `run` of this group.
        """
        with self._call_lock:
            if self._running:
                raise RuntimeError("a model of tensor_parallel cannot be called from inside itself, as from a hook")
            self._error, self._contributions, self._running = None, {}, set(range(self.size))
            self._rng_states = [self._rng_state()] * self.size
            self._share_seed()
            results: list[Any] = [None] * self.size
            context = _TorchContext(self.devices[0].type, self._streams())
            futures: list[Future[None]] = [
                self._threads.submit(copy_context().run, self._run_in_thread, rank, task, results, context)
                for rank in range(1, self.size)
            ]
            self._run_task(0, task, results)
            self._wait_uninterrupted(partial(wait, futures))
            self._set_rng_state(self._rng_states[0])
            self._results = [None] * self.size
            error, self._error = self._error, None
        if error is not None:
            raise error
        return results

    def all_reduce(self, rank: int, x: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce in place, in rank order."""
        self._exchange(rank, x, partial(_reduce, op))

    def reduce_scatter(self, rank: int, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """Sum in rank order. Return this rank's part of the sum along ``dim``, on its device."""
        return self._exchange(rank, x, partial(_reduce_scatter, dim, sizes))

    def all_gather(self, rank: int, value: T) -> list[T]:
        """Gather the values of all ranks. Tensors are copies on the device of this rank; ranks may share a device."""
        return self._exchange(rank, value, self._gather)

    def _gather(self, values: list[Any]) -> list[list[Any]]:
        def copies_on(device: torch.device) -> list[Any]:
            return [value.to(device, copy=True) if isinstance(value, Tensor) else value for value in values]

        copies = {device: copies_on(device) for device in set(self.devices)}
        return [copies[device] for device in self.devices]

    # Turns ------------------------------------------------------------------------------------------------------------

    def _run_in_thread(self, rank: int, task: Callable[[int], Any], results: list[Any], context: _TorchContext) -> None:
        def task_in_context(rank: int) -> Any:
            with context.applied(), self._on_device(rank):  # entering a stream changes the current device
                return task(rank)

        self._wait_for_turn(rank)
        self._run_task(rank, task_in_context, results)

    def _run_task(self, rank: int, task: Callable[[int], Any], results: list[Any]) -> None:
        try:
            if self._error is None:
                with self._on_device(rank):
                    results[rank] = task(rank)
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            self._error = self._error or error
        self._running.discard(rank)
        self._pass_turn(rank)

    def _on_device(self, rank: int) -> Any:
        device = self.devices[rank]
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _exchange(self, rank: int, value: Any, combine: Callable[[list[Any]], list[Any]]) -> Any:
        """Return this rank's element of ``combine(values of all ranks)``. The last rank to arrive calls ``combine``."""
        if self._error is not None:
            raise _OtherRankFailed from self._error
        if rank not in self._running:
            raise RuntimeError(
                "this needs all ranks at once, which are threads that run only while the model is called, such as "
                "merging an adapter with use_dora=True: do it on the model of one process, or with ranks that are "
                "processes (tensor_parallel(model, distributed=True))"
            )
        self._contributions[rank] = value
        if self.devices[rank].type == "cuda":
            self._contributing_streams[rank] = torch.cuda.current_stream(self.devices[rank])
        if len(self._contributions) == self.size:
            values, self._contributions = [self._contributions[other] for other in range(self.size)], {}
            # Use each rank's tensor in the stream that produced it. Copies between devices wait for both streams.
            with torch.no_grad(), ExitStack() as streams:
                for _, stream in sorted(self._contributing_streams.items()):
                    streams.enter_context(torch.cuda.stream(stream))
                self._results = combine(values)
        elif self._running == self._contributions.keys():
            raise RuntimeError(f"rank {rank} waits in a collective for ranks that have ended")
        else:
            self._pass_turn(rank)
            self._wait_for_turn(rank)
            if self._error is not None:
                raise _OtherRankFailed from self._error
        result, self._results[rank] = self._results[rank], None
        return result

    def _pass_turn(self, rank: int) -> None:
        """Pass the turn to the next rank that can run."""
        self._rng_states[rank] = self._rng_state()
        others = [
            other % self.size for other in range(rank + 1, rank + self.size) if other % self.size in self._running
        ]
        runnable = [other for other in others if other not in self._contributions]
        if others and not runnable:
            self._error = self._error or RuntimeError(f"rank {rank} ended while {others} waited for it in a collective")
        if others:
            self._turns[others[0] if self._error else runnable[0]].release()

    def _wait_for_turn(self, rank: int) -> None:
        self._wait_uninterrupted(self._turns[rank].acquire)
        self._set_rng_state(self._rng_states[rank])

    def _wait_uninterrupted(self, wait: Callable[[], Any]) -> None:
        """Keep waiting if interrupted: a rank without the turn must not run. The recorded error ends all ranks."""
        while True:
            try:
                wait()
                return
            except BaseException as error:  # noqa: BLE001  KeyboardInterrupt
                self._error = self._error or error

    def _streams(self) -> list[torch.cuda.Stream]:
        """Return the current stream of each device. Other threads would otherwise start with the default streams."""
        return [torch.cuda.current_stream(device) for device in self.devices if device.type == "cuda"]

    # Random states ----------------------------------------------------------------------------------------------------

    def _share_seed(self) -> None:
        """Copy the generator state of the first GPU to all GPUs. Ranks on the CPU share one generator."""
        if self.devices[0].type == "cuda":
            first, *others = (torch.cuda.default_generators[device.index] for device in self.devices)
            for generator in others:
                generator.set_state(first.get_state())

    def _rng_state(self) -> Any:
        return torch.default_generator.get_state(), np.random.get_state() if self.has_numpy else None

    def _set_rng_state(self, state: Any) -> None:
        torch.default_generator.set_state(state[0])
        if self.has_numpy:
            np.random.set_state(state[1])


class _OtherRankFailed(Exception):
    """Ends a rank that waits for a rank that failed."""


class _TorchContext:
    """Copy of torch's thread-local settings: gradient and inference mode, autocast, function modes, streams."""

    def __init__(self, device_type: str, streams: list[torch.cuda.Stream]) -> None:
        self.streams = streams
        self.grad, self.inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        kinds = [kind for kind in {"cpu", device_type} if torch.is_autocast_enabled(kind)]
        self.autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()) for kind in kinds]
        self.modes = _get_current_function_mode_stack()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the settings to the current thread."""
        with torch.inference_mode(self.inference), torch.set_grad_enabled(self.grad), ExitStack() as stack:
            for kind, dtype, caches in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=caches))
            for stream in self.streams:
                stack.enter_context(torch.cuda.stream(stream))
            for mode in self.modes:
                stack.enter_context(copy(mode))  # `torch.device` stores the device before it
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


def _reduce_scatter(dim: int, sizes: Sequence[int], parts: list[Tensor]) -> list[Tensor]:
    results, start = [], 0
    for rank, size in enumerate(sizes):
        first, *others = (part.narrow(dim, start, size).to(parts[rank].device) for part in parts)
        total = first.clone(memory_format=torch.contiguous_format)
        for other in others:
            total += other
        results.append(total)
        start += size
    return results
