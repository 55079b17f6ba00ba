"""Divides the images of one call of a tower over ranks. Pure functions.

A tower reads its items, images or tiles or videos, by patch or by item:

* by patch: ``[patches of all items, ...]`` or ``[1, patches of all items, ...]``, with ``grid_thw [items, 3]``;
* by item: ``[items, ...]``, with further arguments of as many entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WEIGHTS, IMAGES = "weights", "images"
TOWER_PARALLEL = (WEIGHTS, IMAGES)
"""Values of ``tower_parallel``: what the tensor-parallel ranks divide in towers of images."""
_SIZES = "image_sizes"
"""Argument with the height and width of each item, a tensor or a list. Towers skip the padding of smaller items."""


def divide_by_work(work: Sequence[int], parts: int) -> list[tuple[int, int]]:
    """Divide items into consecutive ranges, so that the largest work of a range is smallest. Some ranges may be empty.

    Args:
        work: the work of each item.
        parts: number of ranges.
    """
    least, most = max(max(work), -(-sum(work) // parts)), sum(work)
    while least < most:
        limit = (least + most) // 2
        if len(_filled(work, limit)) <= parts:
            most = limit
        else:
            least = limit + 1
    ranges = _filled(work, least)
    return ranges + [(len(work), len(work))] * (parts - len(ranges))


def _filled(work: Sequence[int], limit: int) -> list[tuple[int, int]]:
    """Return the fewest ranges with at most ``limit`` work each."""
    ranges, start, total = [], 0, 0
    for i, each in enumerate(work):
        if i > start and total + each > limit:
            ranges.append((start, i))
            start, total = i, 0
        total += each
    return [*ranges, (start, len(work))]


@dataclass(frozen=True)
class TowerCall:
    """Arguments of one call of a tower, and its items.

    Attributes:
        arguments: the arguments by name.
        name: name of the argument with the pixels.
        dim: dimension of the pixels that has the items, or the patches of all items.
        lengths: number of entries of each item in this dimension.
        work: work of each item, in patches or pixels.
    """

    arguments: Mapping[str, Any]
    name: str
    dim: int
    lengths: list[int]
    work: list[int]

    @classmethod
    def of(cls, arguments: Mapping[str, Any], name: str, tower: str) -> TowerCall:
        """Find the items of a call.

        Args:
            arguments: the arguments by name.
            name: name of the argument with the pixels.
            tower: class of the tower, for messages.

        Raises:
            ValueError: it is unknown how to divide an argument.
        """
        values, grid = arguments[name], arguments.get("grid_thw")
        problem = f'tower_parallel="{IMAGES}" cannot divide {{}} of {tower}: {{}}; use tower_parallel="{WEIGHTS}"'
        if not isinstance(values, Tensor):
            raise ValueError(problem.format(name, f"it is a {type(values).__name__} and no tensor"))
        if grid is None:
            sizes = arguments.get(_SIZES)
            work = [1] * len(values) if sizes is None else torch.as_tensor(sizes).prod(-1).tolist()
            call = cls(arguments, name, 0, [1] * len(values), work)
        else:
            lengths = torch.as_tensor(grid).prod(-1).tolist()
            call = cls(arguments, name, int(values.shape[0] == 1 and sum(lengths) > 1), lengths, lengths)
        if sum(call.lengths) != values.shape[call.dim]:
            raise ValueError(problem.format(name, f"its shape is {tuple(values.shape)}, grid_thw counts {lengths}"))
        for other, value in arguments.items():
            if other != name and isinstance(value, Tensor) and not call._is_by_item(other, value):
                reason = f"its shape is {tuple(value.shape)}, and there are {len(call.work)} images"
                raise ValueError(problem.format(other, reason))
        return call

    def others(self, start: int, stop: int) -> dict[str, Any]:
        """Return the arguments except the pixels, for the items ``start`` to ``stop``."""
        return {
            name: value[start:stop] if self._is_by_item(name, value) else value
            for name, value in self.arguments.items()
            if name != self.name
        }

    def entries(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Return the number of entries of each range of items in the dimension of the pixels."""
        return [sum(self.lengths[start:stop]) for start, stop in ranges]

    def _is_by_item(self, name: str, value: Any) -> bool:
        if isinstance(value, Tensor):
            return value.dim() > 0 and len(value) == len(self.work)
        return name == _SIZES and value is not None
