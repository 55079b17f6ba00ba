"""Divides the arguments of a forward into micro-batches: tensors, also inside tuples and model outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers.cache_utils import Cache

OF_ALL_ROWS = {
    *("logits_to_keep", "num_items_in_batch", "mtp_items", "cache_position"),
    *("head_mask", "decoder_head_mask", "cross_attn_head_mask", "vision_feature_layer"),
}
"""Arguments that apply to every row, regardless of their sizes."""
_OF_EACH_ROW = re.compile(r"label|^(start|end)_positions$|lengths?$|^cls_index$|^is_impossible$")
"""Arguments with one element per row if they are vectors."""


def count_rows(batch: Mapping[str, Any], main_input: str) -> int | None:
    """Return the number of rows of a batch, preferably from its main input, or ``None`` if it is unknown."""
    first = (main_input, "inputs_embeds", "decoder_input_ids", "labels", "encoder_outputs")
    for name in (*first, *(name for name in batch if name not in OF_ALL_ROWS)):
        for x in tree_leaves(batch.get(name)):
            if isinstance(x, Tensor) and x.dim() > 1:
                return x.shape[0]
    return None


def divide_rows(batch: Mapping[str, Any], rows: int, size: int) -> list[dict[str, Any]]:
    """Return the arguments for each micro-batch of ``size`` rows.

    Raises:
        ValueError: an argument cannot be divided, or it is unknown whether it has rows. The message names the argument.
    """
    for name, value in batch.items():
        if any(isinstance(x, Cache) for x in tree_leaves(value, is_leaf=lambda x: isinstance(x, Cache))):
            raise ValueError(
                f"{name} is a cache, and each pipeline stage has its own blocks: leave it out, or call generate, which "
                "makes a cache on each stage"
            )
        if any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(value) if name == "encoder_outputs"):
            raise ValueError(f"{name} requires gradients, which stages do not return: detach it")
    if rows == size:
        return [dict(batch)]
    for name, value in batch.items():
        if name not in OF_ALL_ROWS and not _lists_rows(value, rows):
            for x in tree_leaves(value):
                if isinstance(x, Tensor):
                    _check(name, x, rows)

    def part(name: str, value: Any, i: int) -> Any:
        if name in OF_ALL_ROWS:
            return value
        if _lists_rows(value, rows):
            return value[i * size : (i + 1) * size]

        def cut(x: Tensor) -> Tensor:
            dim = _row_dim(name, x)
            if x.dim() == 0 or x.shape[dim] != rows:
                return x
            # Not a view: some models modify their inputs in place.
            return x.narrow(dim, i * size, size).clone()

        return tree_map_only(Tensor, cut, value)

    return [{name: part(name, value, i) for name, value in batch.items()} for i in range(rows // size)]


def _lists_rows(value: Any, rows: int) -> bool:
    """Return whether this is a list with a dictionary for each row, such as object-detection labels."""
    return isinstance(value, list) and len(value) == rows and all(isinstance(each, Mapping) for each in value)


def _row_dim(name: str, x: Tensor) -> int:
    """Return the row dimension. Three-dimensional ``position_ids`` have the kinds of positions before it."""
    return 1 if name == "position_ids" and x.dim() == 3 else 0


def _check(name: str, x: Tensor, rows: int) -> None:
    """Raise ``ValueError`` if it is unknown how to divide a tensor."""
    shape = f"{name} of shape {tuple(x.shape)}"
    if x.dim() == 0:
        return
    count = x.shape[_row_dim(name, x)]
    if x.dim() == 1 and count == rows and not _OF_EACH_ROW.search(name):
        raise ValueError(
            f"{shape}: it is not known whether its elements belong to the {rows} rows. Pass it with shape "
            f"({rows}, 1), or call model.set_micro_batch_size({rows}) for one micro-batch"
        )
    if x.dim() > 1 and count not in (1, rows):
        raise ValueError(
            f"{shape} has not the {rows} rows of the batch and cannot be divided into micro-batches: call "
            f"model.set_micro_batch_size({rows}) for one micro-batch"
        )
