"""Times the products of `linear` against torch's, on the machine at hand and with the weights of a model."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels import linear

Timings = Mapping[int, tuple[float, float]]
"""Seconds of a product here and in torch, by the number of rows."""

FASTER = 1.05
"""The `gain` above which a product counts as faster: less is noise."""
SAMPLED = (1, 2, 4, 8, 16, 32)
"""The numbers of rows that are timed. Between two of them a product is faster if it is at both."""
FEWEST, ENOUGH, MOST, BUDGET = 3, 5, 15, 0.01
"""Pairs of products for one number of rows: at least, enough if they agree, at most; and the seconds they may take."""
WEIGHTS = 64 << 20
"""Bytes of weights that are used in turn, so that they come from memory if the model's do."""

_Weights = Sequence[tuple[Tensor, Tensor | None]]
_measured: dict[tuple[object, ...], Timings] = {}
_measuring = threading.Lock()


def timings(layers: _Weights, io: bool) -> Timings:
    """Time products with weights and biases of one shape and dtype, once in a process for each number of threads.

    Args:
        layers: for which `linear.why_torch` gives no reason.
        io: whether the weights are ``[in, out]``, those of ``Conv1D``.
    """
    (weight, bias), threads = layers[0], torch.get_num_threads()
    key = (tuple(weight.shape), weight.dtype, bias is None, io, threads)
    with _measuring, torch.no_grad():  # ranks may be threads of one process
        if key not in _measured:
            _measured[key] = _time(layers[: 1 + WEIGHTS // weight.nbytes], io)
        return _measured[key]


def gain(seconds: tuple[float, float]) -> float:
    """How many times as long as ours torch's product takes."""
    return seconds[1] / seconds[0]


def faster_rows(found: Timings, dtype: torch.dtype) -> linear.FasterRows:
    """For which numbers of rows a product is faster here, by its timings."""
    wins = {rows: gain(pair) > FASTER for rows, pair in found.items()}
    rows = {sample for sample, won in wins.items() if won}
    for low, high in zip(wins, list(wins)[1:], strict=False):
        if wins[low] and wins[high]:
            rows.update(range(low, high))
    return linear.FasterRows(frozenset(rows), dtype, torch.get_num_threads())


def _time(layers: _Weights, io: bool) -> Timings:
    (weight, _), found = layers[0], {}
    ours, torchs = (linear.conv1d, linear.plain_conv1d) if io else (linear.linear, F.linear)
    for used, _ in layers:
        used.sum()  # a weight that was loaded lazily comes from its file now, not while it is timed
    for rows in SAMPLED:
        if rows <= linear.most_rows(weight.dtype, io):
            x = weight.new_full((1, rows, weight.shape[1 - io]), 0.5)  # no draw from the user's random stream
            found[rows] = _in_turn(partial(ours, x), partial(torchs, x), layers)
    return found


_Product = Callable[[Tensor, Tensor | None], Tensor]


def _in_turn(ours: _Product, torchs: _Product, layers: _Weights) -> tuple[float, float]:
    """Seconds of both, timed in pairs until all of these agree on who is faster or the time is spent.

    Each has other weights than the one before it, which may have left its own in the processor's caches. On a busy
    machine single figures say little: of the medians and the minima, those count by which ours gains less. Threads that
    wait for each other lose by the median there, and a lucky median is caught by the minimum. What one thread computes
    is timed by that thread's own clock, which stops while others have its processor.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: tuple[list[float], list[float]] = ([], [])
    both, calls, end = (ours, torchs), 0, time.perf_counter() + BUDGET
    for product in both:
        product(*layers[-1])  # starts threads, allocates
    for pairs in range(1, MOST + 1):
        for which in (0, 1) if pairs % 2 else (1, 0):
            layer = layers[calls % len(layers)]
            start = clock()
            both[which](*layer)
            seconds[which].append(clock() - start)
            calls += 1
        faster = [gain((one, other)) > FASTER for one, other in zip(*seconds, strict=True)]
        agreed = pairs >= ENOUGH and (all(faster) or not any(faster))
        if agreed or (pairs >= FEWEST and time.perf_counter() > end):
            break
    medians = statistics.median(seconds[0]), statistics.median(seconds[1])
    return min(medians, (min(seconds[0]), min(seconds[1])), key=gain)
