"""State-space mixers, sharded over their heads.

Source: Dao and Gu, "Transformers are SSMs", 2024, section 8.1 (tensor parallelism).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from oslo_models.distributed.sharded_tensor import without_override
from oslo_models.layers.function_overrides import override_attributes
from oslo_models.layers.kinds import ShardedModule, ShardingContext, become, shards
from oslo_models.layers.local_attributes import LocalAttributes, set_local_attributes
from oslo_models.layers.replicated_grads import SumReplicatedGrad
from oslo_models.layers.sharded_activation import ShardedActivation
from oslo_models.layers.token_division import hidden_states_of
from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class StateSpace(LocalAttributes):
    """State-space mixer, sharded over its heads. Parameters of a group are replicated on the ranks with its heads.

    Args:
        attributes: see `LocalAttributes`.
        convolution: name of the convolution. Its parameters have separate entries.
        scales: name of a buffer ``[..., features]`` that scales the outputs of ``in_proj``. Empty without this buffer.

    Source: Dao and Gu, "Transformers are SSMs", 2024, section 8.1 (tensor parallelism).
    """

    is_recurrent: ClassVar[bool] = True
    convolution: str = "conv1d"
    scales: str = ""


class FilteredModule(ShardedModule):
    """Mixin before a module that applies the filters of its depthwise convolution directly, to the local channels.

    Attributes:
        convolution: name of the convolution.
        filters: layouts of its parameters. Ranks with heads of one group replicate the filters of that group's shared
            channels. Each rank computes only the gradient from its local heads, so the gradients are summed.
    """

    convolution: str
    filters: Mapping[str, Layout]

    def configure(self, entry: Any, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.convolution = entry.convolution
        self.filters = {
            leaf: context.layouts[f"{context.name}.{entry.convolution}.{leaf}"]
            for leaf, _ in getattr(self, entry.convolution).named_parameters()
        }
        set_local_attributes(self, entry.attributes, context.tp)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        convolution = getattr(self, self.convolution)
        summed = {
            name: SumReplicatedGrad.apply(getattr(convolution, name), self.tp, layout)
            for name, layout in self.filters.items()
            if layout.overlaps
        }
        # a part of the tokens needs its rules, and weights are plain slices then
        is_part = isinstance(hidden_states_of(args, kwargs), ShardedActivation)
        with nullcontext() if is_part else without_override(), override_attributes(convolution, summed):
            return super().forward(*args, **kwargs)


class StateSpaceModule(FilteredModule):
    """Mixin before a mixer class. The mixer's forward reads the parameters of its convolution directly.

    Attributes:
        scales: name of a buffer with a factor for each output of ``in_proj``, or ``""``. The buffer stays full, since
            transformers recomputes it whenever a model is created.
        scaled: layout of the weight of ``in_proj``.
    """

    scales: str
    scaled: Layout

    def configure(self, entry: StateSpace, context: ShardingContext) -> None:
        super().configure(entry, context)
        self.scales = entry.scales
        if entry.scales:
            self.scaled = context.layouts[f"{context.name}.in_proj.weight"]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        if self.scales:
            own = self.scaled.ranges[self.tp.rank]
            vars(self)[self.scales] = torch.cat([getattr(self, self.scales)[..., a:b] for a, b in own], -1)
        # The training kernel would also apply the norm and the output projection, without an all-reduce.
        self.training = training and self.tp.size == 1
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training
            vars(self).pop(self.scales, None)


@shards(StateSpace)
def shard_mixer(module: Any, entry: StateSpace, context: ShardingContext) -> None:
    """Shard a mixer. A mixer of another type with the same name has local attributes only."""
    if hasattr(module, entry.convolution):
        become(module, StateSpaceModule).configure(entry, context)
    else:
        set_local_attributes(module, entry.attributes, context.tp)
