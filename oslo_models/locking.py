"""Attributes that are computed once across threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class locked_property(cached_property[T]):  # noqa: N801  a decorator
    """``functools.cached_property`` with the lock that Python 3.12 removed. All threads get one value.

    The lock is shared by all instances of the class.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self._guard = threading.RLock()

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        with self._guard:
            return super().__get__(instance, owner)
