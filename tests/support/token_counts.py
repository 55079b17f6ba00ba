"""Counts of collectives along tokens, which sequence parallelism makes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from oslo_models.distributed import autograd_collectives
from oslo_models.layers import token_region


@contextlib.contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count gathers and reduce-scatters along tokens."""
    counts: Counter[str] = Counter()

    def counted(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in (autograd_collectives, token_region):
            patch.setattr(module, "all_gather", counted(module, "all_gather"))
        patch.setattr(autograd_collectives, "reduce_scatter", counted(autograd_collectives, "reduce_scatter"))
        yield counts
