"""The states of the random generators that a script shares with the library: torch's, numpy's and Python's."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def states_after(load: Callable[[], Any]) -> tuple[Any, dict[str, str]]:
    """Return the result of a call, and digests of the generators' states after it. They have the same states before."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    try:
        loaded = load()
        now = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy": str(np.random.get_state()).encode(),
            "random": str(random.getstate()).encode(),
        }
        return loaded, {name: hashlib.md5(state).hexdigest() for name, state in now.items()}
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
