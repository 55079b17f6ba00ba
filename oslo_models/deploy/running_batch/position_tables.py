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

from oslo_models.pipeline.placeholders import Placeholder

_ARGUMENT = "position_ids"
_COUNTING = "create_position_ids_from_input_ids"
"""Method of tables that count positions from the tokens: of M2M-100, and TrOCR with sinusoids."""


def position_table(model: Any) -> nn.Module | None:
    """Return the table of a decoder that does not take positions; ``None`` without such a table on this stage."""
    if _ARGUMENT in inspect.signature(model.forward).parameters:
        return None
    table = getattr(model.get_decoder(), "embed_positions", None)
    if not isinstance(table, nn.Module) or isinstance(table, Placeholder):
        return None
    return table if _takes_positions(table) or hasattr(table, _COUNTING) else None


def _computes(table: nn.Module) -> bool:
    """Return whether a table computes the embeddings of positions in a column: of Pegasus-X."""
    return _takes_positions(table) and not hasattr(table, "weight") and not hasattr(table, "weights")


def _takes_positions(table: nn.Module) -> bool:
    return _ARGUMENT in inspect.signature(table.forward).parameters


@contextmanager
def looking_up(table: nn.Module, positions_BL: Tensor) -> Iterator[None]:
    """Context in which a table returns the embeddings of these positions, [B, L, D]."""

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, _ARGUMENT: positions_BL.flatten()}  # the positions of one row, in its terms

    def divide(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output.reshape(*positions_BL.shape, -1)

    def replace(module: Any, args: Any, output: Tensor) -> Tensor:
        first = module.padding_idx + 1  # a padding token, also a generated one, has no position
        places_BL = (positions_BL + first).where(args[0] != module.padding_idx, module.padding_idx)
        found: Tensor = module.weights[places_BL]
        return found

    def compute(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        row_1LD = args[0].new_empty(1, positions_BL.numel(), args[0].shape[-1])
        return (row_1LD,), {_ARGUMENT: positions_BL.reshape(-1, 1)}

    if _computes(table):
        handles = [table.register_forward_pre_hook(compute, with_kwargs=True), table.register_forward_hook(divide)]
    elif _takes_positions(table):
        handles = [table.register_forward_pre_hook(give, with_kwargs=True), table.register_forward_hook(divide)]
    else:
        handles = [table.register_forward_hook(replace)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
