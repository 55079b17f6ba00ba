"""Standard output that holds the result of a command only."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def chatter_to_stderr() -> Iterator[None]:
    """Send standard output to standard error, also from child processes. Some libraries print when imported."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)
