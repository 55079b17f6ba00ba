"""Changes the sampling rate of a sound by a band-limited filter.

Legend:
    T: samples.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

ZEROS = 64
"""Zero crossings of the filter on each side."""
ROLLOFF = 0.9475937167399596
"""The cutoff frequency, as a part of half of the lower rate."""
BETA = 14.769656459379492
"""Shape of the Kaiser window. These three values are those of the filter ``kaiser_best`` in resampy."""
_PRODUCTS = 1 << 22
"""Limit of the samples that the filter sees at once, each as often as it is used."""


def resample(samples_T: Tensor, rate: int, wanted: int) -> Tensor:
    """Return a sound at another sampling rate. Its length is rounded up.

    Source: J. O. Smith, *Digital Audio Resampling*, https://ccrma.stanford.edu/~jos/resample/. The weights are the
    polyphase components of a windowed sinc, as in ``torchaudio.functional.resample``.
    """
    if rate == wanted:
        return samples_T
    common = math.gcd(rate, wanted)
    old, new = rate // common, wanted // common
    kernel, width = _filter(old, new)
    length = math.ceil(len(samples_T) * new / old)
    steps = math.ceil(length / new)
    taps = kernel.shape[-1]
    padded = torch.nn.functional.pad(samples_T, (width, max(0, (steps - 1) * old + taps - width - len(samples_T))))
    made, block = [], max(1, _PRODUCTS // taps)
    for first in range(0, steps, block):
        count = min(block, steps - first)
        part = padded[first * old : (first + count - 1) * old + taps]
        made.append(torch.nn.functional.conv1d(part[None, None], kernel, stride=old)[0].T.reshape(-1))
    return torch.cat(made)[:length]


@functools.lru_cache(maxsize=16)
def _filter(old: int, new: int) -> tuple[Tensor, int]:
    """Return the weights [new, 1, taps] of ``new`` samples in place of ``old``, and the samples before the first."""
    cutoff = min(old, new) * ROLLOFF
    width = math.ceil(ZEROS * old / cutoff)
    places = torch.arange(-width, width + old, dtype=torch.float64) / old
    delays = torch.arange(0, -new, -1, dtype=torch.float64)[:, None] / new
    times = ((delays + places) * cutoff).clamp(-ZEROS, ZEROS)
    ratio = torch.tensor(BETA, dtype=torch.float64)
    window = torch.i0(BETA * (1 - (times / ZEROS) ** 2).sqrt()) / torch.i0(ratio)
    kernel = torch.sinc(times) * window * (cutoff / old)
    return kernel[:, None].float(), width
