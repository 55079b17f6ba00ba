"""Timers: on a GPU by replayed CUDA graphs with a flushed cache, in a dry run by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

Run = Callable[[], Any]
FLUSHED = 256 << 20
"""Bytes overwritten before each repetition: several times the L2 cache of a GPU."""


@dataclass
class Ceilings:
    """Peak rates of the machine, measured by the process that compares with them.

    Attributes:
        copy: Bytes per second, read and written, of a device-to-device copy.
        product: Operations per second of a large product in bfloat16.
    """

    copy: float
    product: float


class Gpu:
    """Times by CUDA events on the current device."""

    def __init__(self) -> None:
        self._flush: torch.Tensor | None = None
        self._ceilings: Ceilings | None = None
        self._side: torch.cuda.Stream | None = None  # reused: torch keeps freed memory for the stream that allocated it

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seconds(self, run: Run, graph: bool = True, budget: float = 0.2) -> float:
        """Return the median time of ``run`` on the device. The caches are flushed before each run.

        Args:
            graph: Replay it as a CUDA graph, so that launching costs nothing. Code that synchronises needs ``False``.
            budget: Seconds to spend on repetitions.
        """
        replay = self._captured(run) if graph else run
        once = self._median(replay, 3)
        return self._median(replay, max(5, min(200, int(budget / max(once, 1e-6)))))

    def _captured(self, run: Run) -> Run:
        side = self._side = self._side or torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    def _median(self, run: Run, repeats: int) -> float:
        if self._flush is None:
            self._flush = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            self._flush.zero_()
            start.record()
            run()
            end.record()
            times.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) for start, end in times) / 1e3

    def ceilings(self) -> Ceilings:
        """Measure once per process, on random data, since zeros would be faster than real data."""
        if self._ceilings is None:
            source = torch.randint(256, (1 << 30,), dtype=torch.uint8, device="cuda")
            target = torch.empty_like(source)
            copied = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
            del source, target
            a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            product = torch.empty_like(a)
            self._ceilings = Ceilings(copied, 2 * 8192**3 / self.seconds(lambda: torch.mm(a, b, out=product)))
        return self._ceilings

    def wall(self, run: Run, repeats: int = 5) -> list[float]:
        """Return the wall-clock seconds of each call, to the end of its work on the device."""
        return [_clock(run, torch.cuda.synchronize) for _ in range(repeats)]

    def host(self, run: Run, calls: int = 100) -> float:
        """Return the host seconds of a call on small tensors, without waiting for the device."""
        for _ in range(10):
            run()
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            found.append((time.perf_counter() - start) / calls)
        torch.cuda.synchronize()
        return min(found)

    def peak(self, run: Run) -> int:
        """Return the bytes that a call needs beyond the memory allocated before it."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def launches(self, run: Run) -> int:
        """Return the number of driver calls that launch work on the device."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], acc_events=True) as profiler:
            run()
            torch.cuda.synchronize()
        names = ("cudaLaunch", "cuLaunch", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
        return sum(event.count for event in profiler.key_averages() if event.key.startswith(names))


@dataclass
class Cpu:
    """The same methods without a GPU: they call the function once or twice, and their figures mean nothing."""

    _ceilings: Ceilings = field(default_factory=lambda: Ceilings(1e9, 1e9))

    def synchronize(self) -> None:
        pass

    def seconds(self, run: Run, graph: bool = True, budget: float = 0.2) -> float:
        run()
        return _clock(run, self.synchronize)

    def ceilings(self) -> Ceilings:
        return self._ceilings

    def wall(self, run: Run, repeats: int = 5) -> list[float]:
        return [_clock(run, self.synchronize)]

    def host(self, run: Run, calls: int = 100) -> float:
        return _clock(run, self.synchronize)

    def peak(self, run: Run) -> int:
        run()
        return 1

    def launches(self, run: Run) -> int:
        run()
        return 1


def _clock(run: Run, synchronize: Run) -> float:
    synchronize()
    start = time.perf_counter()
    run()
    synchronize()
    return time.perf_counter() - start
