"""Replaces the timings of linear layers in `fuse`, so that its decisions are the same everywhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest import mock

from torch import Tensor

from oslo_kernels import linear, linear_timing
from oslo_kernels.kept_timings import KeptTimings


@contextmanager
def faster_at(
    rows: Collection[int] | None = None, in_file: bool = False, preempted: int = 0, way: str = linear.CPP
) -> Iterator[mock.Mock]:
    """Let our product take half of torch's time at these row counts (default: all), and twice its time elsewhere.

    Yields the stand-in for the measurement of a pair. The file of timings is used only if ``in_file``.

    Args:
        preempted: reported number of preemptions of each measurement.
        way: the faster implementation of our product; all others are slower.
    """

    def seconds(ours: partial[Tensor], torchs: Any, layers: Any) -> tuple[float, float]:
        (x,), faster = ours.args, ours.keywords["faster"]
        wins = (rows is None or x.shape[1] in rows) and faster.ways[x.shape[1]] == way
        return (1e-4, 2e-4) if wins else (2e-4, 1e-4)

    with (
        mock.patch.object(linear_timing, "_kept", KeptTimings(in_file)),
        mock.patch.object(linear_timing, "_preemptions", side_effect=count(0, preempted)),
        mock.patch.object(linear_timing, "_in_turn", side_effect=seconds) as measured,
    ):
        yield measured
