"""Checks of numeric arguments."""

from __future__ import annotations

import operator
from typing import Any


def integer(name: str, value: Any) -> int:
    """Convert a Python or numpy integer to a Python integer. It does not overflow and can be saved as JSON.

    Raises:
        ValueError: the value is not an integer. The message has the name of the argument.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{name}={value!r} is not an integer") from None
