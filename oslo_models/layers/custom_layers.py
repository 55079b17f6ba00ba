"""Sharding of an architecture's own layer classes, by mixins that intercept the torch functions they call."""

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
    """While active, calls of some torch functions are replaced.

    Args:
        overrides: for each replaced function, the one to call with the same arguments.
    """

    def __init__(self, overrides: dict[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self._overrides = overrides

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._overrides.get(func, func)(*args, **(kwargs or {}))


class ColumnParallelModule(_ShardedModule):
    """A layer that calls ``F.linear``, with sharded outputs. Its input ``[..., in]`` is replicated."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        with without_override():
            return super().forward(self.enter_region(x), *args, **kwargs)


class RowParallelModule(_ShardedModule):
    """A layer that calls ``F.linear``, with sharded inputs. Its input is ``[..., local_in]``."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
            return _add_bias(reduce_from(self.tp, F.linear(x, weight)), bias)

        with without_override(), FunctionOverrides({F.linear: linear}):
            return super().forward(self.leave_region(x), *args, **kwargs)


class SummedModule(_ShardedModule):
    """A module whose output is a partial sum on each rank. Its arguments are replicated tensors.

    Attributes:
        returns_partial_sums: whether the caller sums the outputs over the ranks, with others (`SharedExpertsModule`).
    """

    returns_partial_sums = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with without_override():
            first = self.leave_region(self.enter_region(args[0]))  # no dropout is inside
            others = (self._shared(x) for x in args[1:])
            output = super().forward(first, *others, **{name: self._shared(x) for name, x in kwargs.items()})
            return output if self.returns_partial_sums else reduce_from(self.tp, output)

    def _shared(self, x: Tensor) -> Tensor:
        """A replicated argument, whose gradient is summed over the ranks if it has one."""
        return copy_to(self.tp, x) if x.is_floating_point() else x


class SharedParametersModule(nn.Module):
    """Mixed in before a module's class: the gradients of some of its parameters are summed over the ranks.

    Attributes:
        tp: the axis over which the module is sharded.
        shared: the names of these parameters, which every rank holds in full.
    """

    tp: Axis
    shared: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with hidden(self, {name: copy_to(self.tp, getattr(self, name)) for name in self.shared}):
            return super().forward(*args, **kwargs)


class OverlappingParametersModule(nn.Module):
    """Mixed in before a module's class: several ranks hold the same elements of some of its parameters.

    They are those of key-value heads, and each rank has only the gradient that comes through its own query heads.

    Attributes:
        tp: the axis over which the module is sharded.
        overlapping: the layouts of these parameters.
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
    """While active, attributes of a module are ``values``, in place of its parameters of the same names."""
    own = vars(module)
    own |= values
    try:
        yield
    finally:
        for name in values:
            own.pop(name, None)


class SharedOutputModule(_ShardedModule):
    """A replicated module whose output, a tensor or several, the ranks use for different heads.

    The gradients of floating tensors among it are summed over the ranks, so those of its parameters are complete.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return copy_to(self.tp, output)
        return tuple(copy_to(self.tp, each) if isinstance(each, Tensor) else each for each in output)


class VocabParallelModule(_ShardedModule):
    """A layer that calls ``F.embedding``, with a sharded vocabulary. Its input is token ids ``[...]``."""

    layouts: dict[str, Layout]
    padding_idx: int | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *_: Any, **__: Any) -> Tensor:
            return vocab_parallel_embedding(self.tp, ids, weight, self.layouts["weight"], padding_idx)

        with without_override(), FunctionOverrides({F.embedding: embedding}):
            return super().forward(*args, **kwargs)


class GlobalMinMaxModule(_ShardedModule):
    """A module that calls ``min`` and ``max`` on a sharded activation: they are taken over all ranks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def largest(x: Tensor) -> Tensor:
            return reduce_fresh(self.tp, x.max(), MAX)

        with FunctionOverrides({Tensor.max: largest, Tensor.min: lambda x: -largest(-x)}):
            return super().forward(*args, **kwargs)


class GroupMeansModule(_ShardedModule):
    """A module that calls ``mean`` on an activation ``[..., local groups, local heads of each, features]``.

    With more ranks than groups, one group has heads on several of them, over which the mean is taken.

    Attributes:
        heads: the query heads, and with the key-value heads their groups.
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
    """A module that calls ``torch.mean`` and ``torch.std`` on a sharded activation ``[..., local features]``.

    They are taken over the features of all ranks, which are the outputs of one of its column-parallel layers.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layouts: Any = next(layer.layouts for layer in self.modules() if isinstance(layer, ColumnParallelLinear))
        width = layouts["weight"].shape[0]

        def mean(x: Tensor, dim: int, keepdim: bool = False) -> Tensor:
            return copy_to(self.tp, reduce_from(self.tp, x.sum(dim, keepdim))) / width

        def std(x: Tensor, dim: int, keepdim: bool = False, unbiased: bool = True) -> Tensor:
            squares = (x - mean(x, dim, True)).square()
            return (mean(squares, dim, keepdim) * (width / (width - unbiased))).sqrt()

        with FunctionOverrides({torch.mean: mean, torch.std: std}):
            return super().forward(*args, **kwargs)
