"""Mixins that shard custom layer classes. They intercept the torch functions that a layer calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.collectives import MAX, reduce_fresh
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.linear import ColumnParallelLinear, SumReplicatedGrad, _add_bias, _ShardedModule
from oslo_models.layers.vocab_parallel import vocab_parallel_embedding
from oslo_models.sharding.layout import GroupedHeads, Layout


class FunctionOverrides(TorchFunctionMode):
    """Mode that replaces some torch functions.

    Args:
        overrides: for each replaced function, the replacement. It gets the same arguments.
    """

    def __init__(self, overrides: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._overrides = overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._overrides.get(func, func)(*args, **(kwargs or {}))


class ColumnParallelModule(_ShardedModule):
    """Layer that calls ``F.linear``, with sharded output features. The input ``[..., in]`` is replicated."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_override():
            return super().forward(self.enter_region(x), *args, **kwargs)


class RowParallelModule(_ShardedModule):
    """Layer that calls ``F.linear``, with sharded input features. The input is ``[..., local_in]``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return _add_bias(reduce_from(self.tp, F.linear(x, weight)), bias)

        with without_override(), FunctionOverrides({F.linear: linear}):
            return super().forward(self.leave_region(x), *args, **kwargs)


class SummedModule(_ShardedModule):
    """Module with a partial sum as output on each rank. Its arguments are replicated tensors.

    Attributes:
        returns_partial_sums: whether the caller all-reduces the output, together with others (`SharedExpertsModule`).
    """

    returns_partial_sums = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with without_override():
            first = self.leave_region(self.enter_region(args[0]))  # no dropout is inside
            others = (self._shared(x) for x in args[1:])
            output = super().forward(first, *others, **{name: self._shared(x) for name, x in kwargs.items()})
            return output if self.returns_partial_sums else reduce_from(self.tp, output)

    def _shared(self, x: Tensor) -> Tensor:
        """Return a replicated argument. Its gradient, if any, is all-reduced."""
        return copy_to(self.tp, x) if x.is_floating_point() else x


class SharedParametersModule(nn.Module):
    """Mixin before a module class. All-reduces the gradients of some of its parameters.

    Attributes:
        tp: axis over which the module is sharded.
        shared: names of these parameters. Every rank holds them in full.
    """

    tp: Axis
    shared: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with hidden(self, {name: copy_to(self.tp, getattr(self, name)) for name in self.shared}):
            return super().forward(*args, **kwargs)


class OverlappingParametersModule(nn.Module):
    """Mixin before a module class. Several ranks hold the same elements of some of its parameters.

    These parameters belong to replicated key-value heads. Each rank computes only the gradient through its local query
    heads, so the gradients are summed over the ranks with the same elements.

    Attributes:
        tp: axis over which the module is sharded.
        overlapping: layouts of these parameters.
    """

    tp: Axis
    overlapping: Mapping[str, Layout]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        summed = {
            name: SumReplicatedGrad.apply(getattr(self, name), self.tp, layout)
            for name, layout in self.overlapping.items()
            if getattr(self, name).requires_grad
        }
        with hidden(self, summed):
            return super().forward(*args, **kwargs)


@contextmanager
def hidden(module: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Override the parameters of a module by ``values`` of the same names within the block."""
    own = vars(module)
    own |= values
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)


class SharedOutputModule(_ShardedModule):
    """Replicated module with one or several output tensors that each rank uses for its local heads.

    The gradients of floating-point outputs are all-reduced, so the parameter gradients are complete.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return copy_to(self.tp, output)
        return tuple(copy_to(self.tp, each) if isinstance(each, Tensor) else each for each in output)


class VocabParallelModule(_ShardedModule):
    """Layer that calls ``F.embedding``, with a sharded vocabulary. The input is token ids ``[...]``."""

    layouts: dict[str, Layout]
    padding_idx: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
            return vocab_parallel_embedding(self.tp, ids, weight, self.layouts["weight"], padding_idx)

        with without_override(), FunctionOverrides({F.embedding: embedding}):
            return super().forward(*args, **kwargs)


class GlobalMinMaxModule(_ShardedModule):
    """Module that calls ``min`` and ``max`` on a sharded activation. Both are all-reduced."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def largest(x: Tensor) -> Tensor:
            return reduce_fresh(self.tp, x.max(), MAX)

        with FunctionOverrides({Tensor.max: largest, Tensor.min: lambda x: -largest(-x)}):
            return super().forward(*args, **kwargs)


class GroupMeansModule(_ShardedModule):
    """Module that calls ``mean`` on an activation ``[..., local groups, local heads of each, features]``.

    With more ranks than groups, several ranks share the heads of a group, and the mean is taken over these ranks.

    Attributes:
        heads: the query heads, grouped by key-value head.
    """

    heads: GroupedHeads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.tp.size <= self.heads.kv_heads:
            return super().forward(*args, **kwargs)
        start, stop = self.heads.key_value.unit_ranges(self.tp.size)[self.tp.rank]

        def mean(x: Tensor, dim: int) -> Tensor:
            sums = F.pad(x.sum(dim), (0, 0, start, self.heads.kv_heads - stop))  # of all groups
            return copy_to(self.tp, reduce_from(self.tp, sums))[..., start:stop, :] / self.heads.group

        with FunctionOverrides({Tensor.mean: mean}):
            return super().forward(*args, **kwargs)


class GlobalMomentsModule(_ShardedModule):
    """Module that calls ``torch.mean``, ``torch.std`` or ``Tensor.sum`` on an activation ``[..., local features]``.

    All are taken over the features of all ranks. For mean and standard deviation, one of its column-parallel layers
    outputs these features.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layers = (layer for layer in self.modules() if isinstance(layer, ColumnParallelLinear))
        width = next((layer.layouts["weight"].shape[0] for layer in layers), 0)  # type: ignore[index]

        def total(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
            return copy_to(self.tp, reduce_from(self.tp, x.sum(dim, keepdim)))

        def mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
            return total(x, dim, keepdim) / width

        def std(x: Tensor, dim: int, keepdim: bool = False, unbiased: bool = True) -> Tensor:
            squares = (x - mean(x, dim, True)).square()
            return (mean(squares, dim, keepdim) * (width / (width - unbiased))).sqrt()

        with FunctionOverrides({torch.mean: mean, torch.std: std, Tensor.sum: total}):
            return super().forward(*args, **kwargs)
