"""Modules with attributes, arguments or parameters that count heads: each rank sets them to its local heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from oslo_models.distributed.autograd_collectives import copy_to
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.layers.kinds import ShardingContext, become, shards
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.sharding.entry import LocalValue, Replicated
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.local_config import LocalConfig


class LocalHeads(int):
    """Local number of heads. A full width divided by it is the width of a head, as divided by the number of all heads.

    For attention that reshapes to ``[..., heads, width // heads]`` with the width of its replicated input.
    """

    head_dim: int

    def __new__(cls, count: int, head_dim: int = 0) -> LocalHeads:
        made = super().__new__(cls, count)
        made.head_dim = head_dim
        return made

    def __rfloordiv__(self, width: int) -> int:
        return self.head_dim

    @classmethod
    def of(cls, heads: EvenSplit) -> LocalValue:
        """Return the local number of ``heads``, for `LocalAttributes`."""
        return lambda n, rank: cls(heads.local_count(n, rank), heads.width)


@dataclass(frozen=True)
class LocalAttributes(Replicated):
    """Module with attributes that count heads or elements. Each rank sets them to its local counts.

    The parameters of the module need separate entries.

    Args:
        attributes: integer attributes of the module, or of its ``config`` (``"config.num_heads"``). Attributes that the
            module lacks are ignored.
        per_head: arguments of the forward with an entry for each head, such as ALiBi biases. Shape ``[heads, ...]`` or
            ``[rows * heads, ...]``; with four dimensions ``[rows, heads, ...]``.
        width: the heads of an attention that reshapes their outputs to the hidden size.
        shared: direct parameters of the module that all heads share. Every rank holds them in full, and their gradients
            are all-reduced.
        convolution: name of the convolution of a mixer, which reads other tokens by a recurrence or a convolution.
            Context parallelism divides the heads or channels of such a module over the ranks. A module of the same
            name without a convolution is no mixer.
    """

    has_parameters: ClassVar[bool] = False
    attributes: Mapping[str, LocalValue] = field(default_factory=dict)
    per_head: Mapping[str, EvenSplit] = field(default_factory=dict)
    width: EvenSplit | None = None
    shared: tuple[str, ...] = ()
    convolution: str = ""


@shards(LocalAttributes)
def localize(module: Any, entry: LocalAttributes, context: ShardingContext) -> None:
    """Reduce a module's head counts in attributes, arguments and shapes to the local heads."""
    set_local_attributes(module, entry.attributes, context.tp)
    for argument, heads in entry.per_head.items():  # before the width: its class hides the signature
        position = list(inspect.signature(module.forward).parameters).index(argument)
        module.register_forward_pre_hook(
            partial(_slice_per_head_arguments, argument, position, heads, context.tp), with_kwargs=True
        )
    if overlapping := {name: layout for name, layout in context.shards.items() if layout.overlaps}:
        become(module, OverlappingParametersModule)
        module.tp, module.overlapping = context.tp, overlapping
    if entry.shared:
        become(module, SharedParametersModule)
        module.tp, module.shared = context.tp, entry.shared
    if entry.width is not None:
        become(module, LocalWidthModule)
        module.widths = entry.width.extent(), entry.width.local_extent(context.tp.size, context.tp.rank)


def set_local_attributes(module: Any, attributes: Mapping[str, LocalValue], tp: Axis) -> None:
    """Set attributes of a module, or of its configuration, to their local values."""
    for path, value in attributes.items():
        owner, _, attribute = path.rpartition(".")
        if owner == "config":
            module.config = LocalConfig(module.config, **{attribute: value(tp.size, tp.rank)})
        elif hasattr(module, attribute):
            vars(module).setdefault("full_attributes", {})[attribute] = getattr(module, attribute)
            setattr(module, attribute, value(tp.size, tp.rank))


def _slice_per_head_arguments(
    name: str, position: int, heads: EvenSplit, tp: Axis, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Return a call's arguments, with one of them sliced to the local heads."""
    value = kwargs.get(name, args[position] if position < len(args) else None)
    if value is None:
        return args, kwargs
    start, stop = heads.unit_ranges(tp.size)[tp.rank]
    if value.dim() >= 4:  # [rows, heads or 1, queries, keys]
        own = value[:, start:stop] if value.shape[1] == heads.count else value
    else:
        own = value.unflatten(0, (-1, heads.count))[:, start:stop].flatten(0, 1)
    if name in kwargs:
        return args, {**kwargs, name: own}
    return (*args[:position], own, *args[position + 1 :]), kwargs


class SharedParametersModule(nn.Module):
    """Mixin before a module class. All-reduces the gradients of some of its parameters.

    Attributes:
        tp: axis over which the module is sharded.
        shared: names of these parameters. Every rank holds them in full.
    """

    tp: Axis
    shared: tuple[str, ...]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with override_attributes(self, {name: copy_to(self.tp, getattr(self, name)) for name in self.shared}):
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
        with override_attributes(self, summed):
            return super().forward(*args, **kwargs)


class LocalWidthReshape(TorchFunctionMode):
    """Mode that replaces the full width in reshapes by the local width if the full width does not fit.

    Args:
        full: width of all heads.
        local: width of the local heads.
    """

    def __init__(self, full: int, local: int) -> None:
        super().__init__()
        self._full, self._local = full, local

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.view, Tensor.reshape) and args[-1] == self._full:
            x, *sizes = args
            local_sizes = (*sizes[:-1], self._local)
            if prod(sizes) != x.numel() == prod(local_sizes):
                return func(x, *local_sizes)
        return func(*args, **(kwargs or {}))


class LocalWidthModule(nn.Module):
    """Mixin before an attention class. Runs its forward under `LocalWidthReshape`.

    Attributes:
        widths: the full and the local width.
    """

    widths: tuple[int, int]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with LocalWidthReshape(*self.widths):
            return super().forward(*args, **kwargs)
