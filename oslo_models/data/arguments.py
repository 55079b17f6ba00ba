"""Checks of numeric arguments."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any) -> int:
    """Return an integer of Python or numpy as Python's, which does not overflow and can be saved as JSON.

    Raises:
        ValueError: it is not an integer; the message has the name of the argument.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is not an integer") from None
