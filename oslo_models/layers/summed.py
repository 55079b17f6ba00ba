"""Modules with a partial sum as output on each rank, and replicated modules with an output for the local heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from oslo_models.distributed.autograd_collectives import copy_to, reduce_from
from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.kinds import ShardedModule, ShardingContext, shards
from oslo_models.layers.local_attributes import LocalAttributes, localize
from oslo_models.sharding.entry import Replicated


@dataclass(frozen=True)
class SummedModule(LocalAttributes):
    """Module with a partial sum as output on each rank. Its sharded parameters have separate entries.

    Inputs are replicated, such as the hidden states and router weights of experts.
    """


@shards(SummedModule)
class SummedLayer(ShardedModule):
    """Module with a partial sum as output on each rank. Its arguments are replicated tensors.

    Attributes:
        returns_partial_sums: whether the caller all-reduces the output, together with others (`SharedExpertsModule`).
    """

    returns_partial_sums = False

    def configure(self, entry: SummedModule, context: ShardingContext) -> None:
        super().configure(entry, context)
        localize(self, entry, context)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with without_override():
            first = self.leave_region(self.enter_region(args[0]))  # no dropout is inside
            others = (self._shared(x) for x in args[1:])
            output = super().forward(first, *others, **{name: self._shared(x) for name, x in kwargs.items()})
            return output if self.returns_partial_sums else reduce_from(self.tp, output)

    def _shared(self, x: Tensor) -> Tensor:
        """Return a replicated argument. Its gradient, if any, is all-reduced."""
        return copy_to(self.tp, x) if x.is_floating_point() else x


@dataclass(frozen=True)
class SharedOutput(Replicated):
    """Replicated module with an all-reduced output gradient: each rank uses the output for its local heads."""

    def covers_submodules(self) -> bool:
        return True


@shards(SharedOutput)
class SharedOutputLayer(ShardedModule):
    """Replicated module with one or several output tensors that each rank uses for its local heads.

    The gradients of floating-point outputs are all-reduced, so the parameter gradients are complete.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return copy_to(self.tp, output)
        return tuple(copy_to(self.tp, each) if isinstance(each, Tensor) else each for each in output)
