"""Interleave the samples of several datasets so that every prefix contains each dataset's share.

The method is Pfair scheduling (Baruah et al., 1996) on one processor. Sample ``j`` of a dataset with share ``s`` of
``total`` is released at position ``floor(j * total / s)`` and has its deadline at ``ceil((j + 1) * total / s)``; each
position takes the released sample with the earliest deadline. The first ``k`` positions then hold ``k * s / total``
samples of that dataset, rounded up or down.
"""

from __future__ import annotations

import ctypes
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from oslo_kernels.build import BuildError, load


def blend(shares: NDArray[np.int64], size: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Assign positions to datasets. Without a compiler, plain Python computes this (25 times as slow).

    Args:
        shares: ``[datasets]``, the share of each, not negative; their sum is below 2**63.
        size: the number of positions, at most 2**32.

    Returns:
        Two arrays ``[size]``: for each position the dataset, and the index of the sample in it.

    Raises:
        ValueError: the shares or the size are out of range.
    """
    total = sum(map(int, shares))
    if not (total < 2**63 and 0 <= size <= 2**32 and (shares >= 0).all() and (total > 0 or size == 0)):
        raise ValueError(f"{size} positions cannot be shared: shares are at least 0, with a sum of 1 to 2**63 - 1")
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
    """`blend` in Python."""
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
