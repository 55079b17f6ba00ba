"""Layers of an architecture's own that apply torch's functions to their parameters: put in front of their classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from oslo_models.distributed.autograd_collectives import reduce_from
from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.layers.linear import _add_bias, _ShardedModule
from oslo_models.layers.vocab_parallel import look_up
from oslo_models.sharding.layout import Layout


class Overridden(TorchFunctionMode):
    """While active, calls of one of torch's functions are calls of another one.

    Args:
        overrides: by function; called with the same arguments.
    """

    def __init__(self, overrides: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._overrides = overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._overrides.get(func, func)(*args, **(kwargs or {}))


class ColumnParallelModule(_ShardedModule):
    """A layer that applies ``F.linear``, with its outputs divided. Its input ``[..., in]`` is replicated."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.enter_region(x), *args, **kwargs)


class RowParallelModule(_ShardedModule):
    """A layer that applies ``F.linear``, with its inputs divided. Its input is ``[..., local_in]``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return _add_bias(reduce_from(self.tp, F.linear(x, weight)), bias)

        with Overridden({F.linear: linear}):
            return super().forward(self.leave_region(x), *args, **kwargs)


class VocabParallelModule(_ShardedModule):
    """A layer that applies ``F.embedding``, with its rows divided. Its input is ``[...]`` of ids."""

    layouts: dict[str, Layout]
    padding_idx: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
            return look_up(self.tp, ids, weight, self.layouts["weight"], padding_idx)

        with Overridden({F.embedding: embedding}):
            return super().forward(*args, **kwargs)


class GlobalMinMaxModule(_ShardedModule):
    """A module that looks for the smallest and the largest element of a divided activation, by ``min`` and ``max``."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def largest(x: Tensor) -> Tensor:
            return reduce_fresh(self.tp, x.max(), MAX)

        with Overridden({Tensor.max: largest, Tensor.min: lambda x: -largest(-x)}):
            return super().forward(*args, **kwargs)
