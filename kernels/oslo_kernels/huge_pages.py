"""Memory of weights in pages of 2 MiB, which is read faster than in those of 4 KiB: fewer addresses are looked up.

Linux collapses pages that are there already (since 6.1), in place: addresses and contents stay. Elsewhere, and for
memory that is mapped from a file, nothing happens.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Iterable
from functools import cache

from torch import Tensor

PAGE = 2 << 20
BUDGET = 1.0
"""Seconds after which the rest of the weights stays as it is: a page takes some milliseconds."""
_HUGE, _COLLAPSE = 14, 25  # MADV_HUGEPAGE and MADV_COLLAPSE, see madvise(2)
FEWEST = 4
"""Whole pages that a tensor has to have for `fresh`."""


def collapse(tensors: Iterable[Tensor], budget: float = BUDGET) -> int:
    """Collapse the pages that CPU tensors of at least half a page lie in; returns how many of them are huge now.

    Args:
        budget: seconds that this may take.
    """
    advise, end, made = _advise(), time.monotonic() + budget, 0
    if advise is None:
        return 0
    done = 0  # tensors often share pages with the next one
    for tensor in sorted((t for t in tensors if t.is_cpu and 2 * t.nbytes >= PAGE), key=Tensor.data_ptr):
        begin = tensor.data_ptr()
        for page in range(max(done, begin // PAGE * PAGE), begin + tensor.nbytes, PAGE):
            if time.monotonic() > end:
                return made
            made += advise(page, PAGE, _COLLAPSE) == 0
            done = page + PAGE
    return made


def fresh(tensor: Tensor) -> Tensor:
    """A tensor that nothing was written to yet, whose memory comes in huge pages where it is new to the process.

    The system then clears and maps 2 MiB at a time. For an output of a product that is larger than what the allocator
    keeps (32 MiB, glibc), pages of 4 KiB take half as long as the product.
    """
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.nbytes) // PAGE * PAGE - begin
    if size >= FEWEST * PAGE and tensor.is_cpu and (advise := _advise()) is not None:
        advise(begin, size, _HUGE)
    return tensor


@cache
def _advise() -> Callable[[int, int, int], int] | None:
    """``madvise`` of the C library, on Linux."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    advise: Callable[[int, int, int], int] = function
    return advise
