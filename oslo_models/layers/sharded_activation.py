"""`ShardedActivation`: an activation that behaves like the full tensor while each rank stores its local shard.

A derived plan does not know the code between two layers. So a layer output records how it is sharded. Supported
operations run on the shards (`activation_rules`), and all others gather the full tensor first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from oslo_models.distributed.autograd_collectives import copy_to, gather_from, scatter_to
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.plain_functions import PLAIN_FUNCTIONS
from oslo_models.sharding.layout import EvenSplit

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
RULES: dict[Any, Rule] = {}
"""``rule(function, args, kwargs)`` for each torch function that runs on shards. May return NotImplemented."""


@dataclass(frozen=True)
class ShardSpec:
    """How an activation is sharded.

    Attributes:
        dim: sharded dimension, counted from the front.
        units: number of indivisible units of each part. Equal units imply equal ranges of ranks.
        parts: number of parts of equal size that the dimension concatenates. A rank has its range of each part.
    """

    dim: int
    units: int
    parts: int = 1

    def sizes(self, full: int, n: int) -> list[int]:
        """Return, for each rank, its number of elements of one part, for a dimension of size ``full``."""
        inner = full // self.parts
        return [stop - start for start, stop in EvenSplit(self.units, inner // self.units).ranges(n)]


class Observer(Protocol):
    """Observes activations while a plan is derived."""

    def gathered(self, sources: frozenset[str], why: str) -> None:
        """Report that an operation gathered the outputs of these layers."""

    def propose(self, sources: frozenset[str], units: int | None = None, parts: int | None = None) -> None:
        """Report a split that would have kept the outputs of these layers sharded."""


class ShardedActivation(Tensor):
    """Local shard of an activation that behaves like the full tensor.

    Attributes:
        tp: axis over which it is sharded.
        spec: how it is sharded.
        full_shape: shape of the full tensor.
        sources: names of the layers that it was computed from, if ``observer`` is set.
        observer: observer of this activation, or ``None``.
    """

    tp: Axis
    spec: ShardSpec
    full_shape: torch.Size
    sources: frozenset[str]
    observer: Observer | None

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        tp: Axis,
        spec: ShardSpec,
        full_size: int,
        sources: frozenset[str] = frozenset(),
        observer: Observer | None = None,
    ) -> ShardedActivation:
        """Make an activation from this rank's shard.

        Args:
            local: local shard.
            tp: axis over which it is sharded.
            spec: how it is sharded.
            full_size: full size of the sharded dimension.
            sources, observer: see the class.
        """
        made = local.as_subclass(cls)
        made.tp, made.spec, made.sources, made.observer = tp, spec, sources, observer
        made.full_shape = torch.Size((*local.shape[: spec.dim], full_size, *local.shape[spec.dim + 1 :]))
        return made

    def local(self) -> Tensor:
        """Return the local shard as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def full(self, why: str = "") -> Tensor:
        """Gather the full tensor on every rank. A collective."""
        if self.observer is not None:
            self.observer.gathered(self.sources, why)
        dim, sizes = self.spec.dim, self.spec.sizes(self.full_shape[self.spec.dim], self.tp.size)
        if self.tp.size == 1 or self.spec.parts == 1:
            return gather_from(self.tp, self.local(), dim, sizes)
        return gather_from(self.tp, self.local().unflatten(dim, (self.spec.parts, -1)), dim + 1, sizes).flatten(
            dim, dim + 1
        )

    def with_local(
        self, local: Tensor, spec: ShardSpec | None = None, full_size: int | None = None
    ) -> ShardedActivation:
        """Return the result of an operation on this activation.

        Args:
            local: local shard of the result.
            spec: how the result is sharded. Default: like this activation.
            full_size: full size of the sharded dimension. Default: unchanged.
        """
        spec = spec or self.spec
        size = self.full_shape[self.spec.dim] if full_size is None else full_size
        return self.from_local(local, self.tp, spec, size, self.sources, self.observer)

    def remaker(self) -> Callable[[Tensor], ShardedActivation]:
        """Return a function that marks a local shard like this activation. It does not keep the shard."""
        return partial(self.from_local, tp=self.tp, spec=self.spec, full_size=self.full_shape[self.spec.dim])

    def slice_of(self, x: Tensor, dim: int) -> Tensor:
        """Return the local shard of a full tensor ``x``: shard its dimension ``dim`` like this activation."""
        sizes = self.spec.sizes(x.shape[dim], self.tp.size)
        if self.tp.size == 1 or self.spec.parts == 1:
            return scatter_to(self.tp, x, dim, sizes)
        return scatter_to(self.tp, x.unflatten(dim, (self.spec.parts, -1)), dim + 1, sizes).flatten(dim, dim + 1)

    def copy_of(self, x: Tensor) -> Tensor:
        """Return a full tensor ``x`` that every rank uses in full. Its gradient is all-reduced."""
        return copy_to(self.tp, x)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.full().__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.full().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PLAIN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _on_full(func, args, kwargs)


_PLAIN = PLAIN_FUNCTIONS - {Tensor.register_hook, Tensor.is_contiguous}


def _on_full(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function with full tensors, and copy its in-place changes back to the shards."""
    name = getattr(func, "__name__", str(func))
    given: list[tuple[ShardedActivation, Tensor, int]] = []

    def full(value: Any) -> Any:
        if not isinstance(value, ShardedActivation):
            return value
        made = value.full(name)
        if value.tp.size == 1:  # `full` has returned the same tensor
            made = made.clone()
        given.append((value, made, made._version))
        return made

    args, kwargs = tree_map(full, (args, kwargs))
    result = func(*args, **kwargs)
    for activation, made, version in given:
        if made._version != version:
            activation.local().copy_(activation.slice_of(made, activation.spec.dim))
            if result is made:
                result = activation
    return result


def gathered(value: Any) -> Any:
    """Gather all activations in ``value``, also inside tuples, lists and dictionaries. A collective."""
    if isinstance(value, ShardedActivation):
        return value.full("an output of the model")
    if type(value) is tuple or type(value) is list:
        return type(value)(gathered(each) for each in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(gathered(each) for each in value))
    if isinstance(value, dict):
        changed = {key: gathered(each) for key, each in value.items()}
        for key, each in changed.items():
            if each is not value[key]:
                value[key] = each
    return value
