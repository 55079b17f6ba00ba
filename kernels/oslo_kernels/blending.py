"""In which order samples of several datasets come, so that at every moment each has had its share.

The method is that of Pfair scheduling (Baruah et al., 1996) on one processor: sample ``j`` of a dataset with share
``s`` of ``total`` may come from place ``floor(j * total / s)`` on and has to come before ``ceil((j + 1) * total / s)``;
of those that may, the one that has to come first does. Then a dataset has had, after ``k`` places, ``k * s / total``
samples, rounded up or down.
"""

from __future__ import annotations

import ctypes
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from oslo_kernels.build import BuildError, load


def blend(shares: NDArray[np.int64], size: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Distribute places among datasets; compiled where there is a compiler, in Python (25 times as slow) elsewhere.

    Args:
        shares: [datasets] of each, not negative; their sum is below 2**63.
        size: the places, at most 2**32.

    Returns:
        For each place, [size]: the dataset, and how many of its samples came before.
    """
    total = sum(map(int, shares))
    assert total < 2**63 and size <= 2**32 and (shares >= 0).all() and (total > 0 or size == 0)
    dataset, sample = np.empty(size, np.uint32), np.empty(size, np.uint32)
    try:
        library = load("blending.cpp")
    except BuildError:
        _reference([int(share) for share in shares], total, dataset, sample)
        return dataset, sample
    shares = np.ascontiguousarray(shares, np.int64)
    count, pointers = ctypes.c_int64, (array.ctypes.data_as(ctypes.c_void_p) for array in (dataset, sample))
    library.oslo_blend(count(len(shares)), count(size), shares.ctypes.data_as(ctypes.c_void_p), count(total), *pointers)
    return dataset, sample


def _reference(shares: list[int], total: int, dataset: NDArray[np.uint32], sample: NDArray[np.uint32]) -> None:
    """The same in Python."""
    size = len(dataset)
    opening: dict[int, list[int]] = {0: [i for i, share in enumerate(shares) if share]}
    done, open_ = [0] * len(shares), list[tuple[int, int]]()
    for k in range(size):
        for i in opening.pop(k, ()):
            heappush(open_, (-(-(done[i] + 1) * total // shares[i]), i))
        _, i = heappop(open_)
        dataset[k], sample[k] = i, done[i]
        done[i] += 1
        opens = max(done[i] * total // shares[i], k + 1)
        if opens < size:
            opening.setdefault(opens, []).append(i)
