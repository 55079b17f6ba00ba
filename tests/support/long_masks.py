"""Long masks for short test batches: lazy masks from the first token on, in small blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from oslo_models.layers import blockwise_attention as blockwise
from oslo_models.layers import lazy_mask


@contextmanager
def short_blocks(block: int = 4) -> Iterator[list[tuple[int, ...]]]:
    """Make every mask lazy, in blocks of so many tokens. Yields the shapes of queries that were computed by blocks."""
    shapes: list[tuple[int, ...]] = []
    right = blockwise._BlockwiseAttention.apply

    def apply(query: Tensor, *args: Any) -> Any:
        shapes.append(tuple(query.shape))
        return right(query, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "LEAST", 1)
        patch.setattr(lazy_mask, "BLOCK", block)
        patch.setattr(lazy_mask, "_MASKED_KEYS", 3 * block)
        patch.setattr(blockwise._BlockwiseAttention, "apply", apply)
        yield shapes


def by_blocks(check: Callable[..., Any], *args: Any) -> Any:
    """Call a check on a rank with lazy masks. Some layer computes by blocks."""
    with short_blocks() as shapes:
        result = check(*args)
    assert shapes
    return result
