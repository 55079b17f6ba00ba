"""Records the dropout masks that ranks draw, joins them, and replays them in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

RATE = 0.3


class _Dropouts(TorchFunctionMode):
    """Replaces every call of ``F.dropout`` that may drop something by `drop`, which a subclass defines."""

    drop: Callable[[Tensor, float], Tensor]

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not F.dropout:
            assert "dropout" not in func.__name__ or func in (torch.dropout, F.dropout), func
            return func(*args, **kwargs)
        x, p, training, inplace = self._bind(*args, **kwargs)
        assert not inplace
        return self.drop(x, p) if training and p else x

    @staticmethod
    def _bind(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> tuple[Any, ...]:
        return x, p, training, inplace


class Recorder(_Dropouts):
    """Applies dropout unchanged, and records the factors of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def drop(self, x: Tensor, p: float) -> Tensor:
        state = torch.get_rng_state()
        mask = F.dropout(torch.ones_like(x), p)
        torch.set_rng_state(state)
        dropped = F.dropout(x, p)
        assert torch.allclose(dropped, x * mask, rtol=1e-15, atol=0)
        self.masks.append(mask.detach())
        return dropped


class Replay(_Dropouts):
    """Multiplies inputs by given factors instead of drawing masks."""

    def __init__(self, masks: Sequence[Tensor]) -> None:
        super().__init__()
        self.masks: Iterator[Tensor] = iter(masks)

    def drop(self, x: Tensor, p: float) -> Tensor:
        mask = next(self.masks)
        assert mask.shape == x.shape
        return x * mask


def join_masks(masks: Sequence[Tensor], full_shape: Sequence[int]) -> tuple[Tensor, bool]:
    """Join the masks of all ranks; return the mask of the full activation, and whether the activation is sharded."""
    first = masks[0]
    if tuple(first.shape) == tuple(full_shape):
        assert all(torch.equal(first, mask) for mask in masks), "a replicated activation, and masks differ"
        return first, False
    (dim,) = (dim for dim, size in enumerate(full_shape) if first.shape[dim] != size)
    return torch.cat(list(masks), dim), True


class Shapes(_Dropouts):
    """Records the input shapes of dropout calls, and drops nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def drop(self, x: Tensor, p: float) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return x


def check_masks(sharded: list[Tensor], replicated: list[Tensor], of_ranks: Sequence[list[Tensor]]) -> None:
    """Check that all masks differ, also between ranks, and that the dropped share is about right."""
    assert sharded
    for masks in of_ranks:
        large = [mask for mask in masks if mask.numel() > 100]
        for one, other in itertools.combinations(large, 2):
            assert one.shape != other.shape or not torch.equal(one, other)
    for masks in zip(*of_ranks, strict=True):
        a, b = masks[:2]
        if a.shape == b.shape and a.numel() > 50 and not any(torch.equal(a, mask) for mask in replicated):
            agreement = ((a == 0) == (b == 0)).double().mean().item()  # 0.58 when independent
            assert agreement < 0.95, "ranks drop the same elements of a sharded activation"
    for kind in filter(None, (sharded, replicated)):
        dropped = torch.cat([(mask == 0).flatten() for mask in kind]).double()
        assert abs(dropped.mean().item() - RATE) < 6 * (RATE / len(dropped)) ** 0.5
