"""Positions of each row for decoders that look them up in a table and whose forward does not take them, such as BART.

Such a decoder counts positions from the columns of the cache, which belong to the longest row.

Legend:
    B: rows.
    L: positions.
    D: size of a hidden state.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from oslo_models.pipeline.sharded_model import ShardedModel

_ARGUMENT = "position_ids"


def position_table(model: ShardedModel) -> nn.Module | None:
    """Return the table of a decoder that does not take positions; ``None`` without such a table on this stage."""
    if _ARGUMENT in inspect.signature(model.forward).parameters:
        return None
    table = getattr(model.get_decoder(), "embed_positions", None)
    if not isinstance(table, nn.Module) or _ARGUMENT not in inspect.signature(table.forward).parameters:
        return None
    return table


@contextmanager
def looking_up(table: nn.Module, positions_BL: Tensor) -> Iterator[None]:
    """Context in which a table returns the embeddings of these positions, [B, L, D]."""

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, _ARGUMENT: positions_BL.flatten()}  # the positions of one row, in its terms

    def divide(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.reshape(*positions_BL.shape, -1)

    handles = (
        table.register_forward_pre_hook(give, with_kwargs=True),
        table.register_forward_hook(divide),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
