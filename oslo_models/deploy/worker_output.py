"""Where new workers write: to the standard output and error of the application, or to one other descriptor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_redirected: list[int] = []


def worker_output() -> tuple[int, int]:
    """Return the descriptors for the standard output and error of a new worker."""
    return (_redirected[-1],) * 2 if _redirected else (1, 2)


@contextmanager
def workers_write_to(descriptor: int) -> Iterator[None]:
    """Let the workers that this process starts in the context write to ``descriptor``.

    The descriptor is for all threads, because a supervisor thread restarts workers.
    """
    _redirected.append(descriptor)
    try:
        yield
    finally:
        _redirected.remove(descriptor)
