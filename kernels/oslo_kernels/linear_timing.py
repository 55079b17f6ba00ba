"""Time the products of `linear` against torch's on this machine, with the weights of a model."""

from __future__ import annotations

import resource
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from oslo_kernels import linear, split_product
from oslo_kernels.kept_timings import KeptTimings, Seconds, Timings

FASTER = 1.05
"""The `gain` above which a product counts as faster; anything less is noise."""
SAMPLED = (1, 2, 4, 8, 16, 32, 64, linear.MOST_TIMED)
"""The numbers of rows to time. Between two of them a product counts as faster if it is faster at both."""
LARGEST = 1 << 31
"""Multiplications of the largest product to time: some ten milliseconds. With `linear.MOST_TIMED` rows and a larger
weight, such as the weight of an LM head, a part of the outputs is timed."""
FEWEST, ENOUGH, MOST, BUDGET = 3, 5, 15, 0.01
"""Timed pairs per number of rows: at least, enough if all agree, and at most; then the time budget in seconds."""
WEIGHTS = 64 << 20
"""Bytes of weights to cycle through, so that they are read from memory if the model exceeds the caches."""

_Weights = Sequence[tuple[Tensor, Tensor | None]]
_kept = KeptTimings()
_measuring = threading.Lock()


def timings(layers: _Weights, io: bool, processes: int = 1) -> Timings | str:
    """Time products with weights and biases of one shape and dtype, once on a machine for each number of threads.

    Threads wait for each other after each product. They all wait if another process has taken the core of one thread.
    Timings of milliseconds cannot tell how often that happens.

    Args:
        layers: weights and biases for which `linear.ways_of` names implementations.
        io: whether the weights are ``[in, out]``, as in ``Conv1D``.
        processes: the number of processes that time at once, since they share the memory bandwidth.

    Returns:
        The timings, or the reason why there are no reliable timings. The next process checks the reason again.
    """
    (weight, bias), threads = layers[0], torch.get_num_threads()
    cycled = layers[: 1 + WEIGHTS // weight.nbytes]
    shape = f"{'x'.join(map(str, weight.shape))}{' in-out' * io}{' bias' * (bias is not None)} of {len(cycled)}"
    key = f"{weight.dtype} {shape}, {threads} threads, {processes} processes"
    with _measuring, torch.no_grad():  # locked, since ranks may be threads of one process
        found = _kept.get(key)
        if found is None:
            before = _preemptions()
            found = _time(cycled, io)
            if threads > 1 and (preempted := _preemptions() - before) > threads:
                found = f"other programs keep the cores busy (preempted {preempted} times while it was timed)"
            _kept.add(key, found)
        return found


def _preemptions() -> int:
    """Return how often the threads of this process have lost their core to others."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def gain(seconds: Seconds) -> float:
    """Return torch's time divided by ours."""
    return seconds[1] / seconds[0]


def fastest(timed: Mapping[str, Seconds]) -> tuple[str, Seconds]:
    """Return the implementation with the largest gain, its seconds and torch's seconds."""
    return max(timed.items(), key=lambda item: gain(item[1]))


def faster_rows(found: Timings, dtype: torch.dtype) -> linear.FasterRows:
    """Return the numbers of rows for which a product is faster here, with the fastest implementation, by timings."""
    ways = {rows: way for rows, timed in found.items() for way, pair in (fastest(timed),) if gain(pair) > FASTER}
    sampled = list(found)
    for low, high in zip(sampled, sampled[1:], strict=False):
        both = {
            way: (1.0, min(gain(found[low][way]), gain(found[high][way])))
            for way in found[low].keys() & found[high].keys()
        }
        if both and gain(fastest(both)[1]) > FASTER:
            ways.update(dict.fromkeys(range(low + 1, high), fastest(both)[0]))
    return linear.FasterRows(ways, ways.get(linear.MOST_TIMED), dtype, torch.get_num_threads())


def _time(layers: _Weights, io: bool) -> Timings:
    (weight, bias), found = layers[0], dict[int, dict[str, Seconds]]()
    ours, torchs = (linear.conv1d, linear.plain_conv1d) if io else (linear.linear, F.linear)
    for used, _ in layers:
        used.sum()  # pages of a memory-mapped weight are loaded now, not while it is timed
    ways = linear.ways_of(weight, bias, io)
    for rows in SAMPLED:
        x = weight.new_full((1, rows, weight.shape[1 - io]), 0.5)  # constant: the user's random state does not change
        timed = layers
        if rows == linear.MOST_TIMED and not io and rows * weight.numel() > LARGEST:
            outputs = max(linear.FEWEST_OUTPUTS, LARGEST // (rows * weight.shape[1]))
            timed = [(one[:outputs], bias if bias is None else bias[:outputs]) for one, bias in layers]
        for way in ways:
            if _is_timed(way, rows, timed[0][0], io):
                # the look-up is timed too
                always = linear.FasterRows({rows: way}, None, weight.dtype, torch.get_num_threads())
                pair = _in_turn(partial(ours, x, faster=always), partial(torchs, x), timed)
                found.setdefault(rows, {})[way] = pair
    return found


def _is_timed(way: str, rows: int, weight: Tensor, io: bool) -> bool:
    """Return whether to time an implementation: it may be faster for these rows, and the product is not too large."""
    if way == linear.CPP:
        return rows <= linear.most_rows(weight.dtype, io)
    return rows * weight.numel() <= LARGEST and (way != linear.SPLIT or rows >= split_product.FEWEST_ROWS)


_Product = Callable[[Tensor, Tensor | None], Tensor]


def _in_turn(ours: _Product, torchs: _Product, layers: _Weights) -> Seconds:
    """Time both in pairs until all pairs agree on the faster one or the time budget is spent. Return the seconds.

    Consecutive products use different weights, since the caches may hold the previous ones. Single timings are
    unreliable on a busy machine. There are three candidate pairs: the medians, the minima, and the pair at the lower
    quartile of gains. The pair with the lowest gain counts. The median shows threads that wait for each other, the
    minimum corrects a lucky median, and the quartile leaves a product to torch if it gains in some pairs only. With one
    thread, the clock is the CPU time of the thread, which stops while another process has the core.
    """
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds: tuple[list[float], list[float]] = ([], [])
    both, calls, end = (ours, torchs), 0, time.perf_counter() + BUDGET
    for product in both:
        product(*layers[-1])  # warm-up: starts threads, allocates
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
    quartile = sorted(zip(*seconds, strict=True), key=gain)[len(seconds[0]) // 4]
    return min(medians, (min(seconds[0]), min(seconds[1])), quartile, key=gain)
