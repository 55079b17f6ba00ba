"""Experts over the ranks that divide tokens: each rank sends its tokens to the ranks of their experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oslo_models.distributed.autograd_collectives import gather_from, gather_to, scatter_to
from oslo_models.layers.context_rules import LocalTokensModule
from oslo_models.sharding.layout import even_ranges


class ContextExperts(LocalTokensModule):
    """Mixin before `ParallelExperts` with experts over more ranks than the tp axis.

    If the caller has all tokens, each rank sends a share of them, too. So an expert receives every token once, and the
    sum of its gradients over the ranks is right for divided and whole tokens, also if replicas differ in that.
    """

    def of_whole_tokens(self, hidden_states: Tensor, *args: Any) -> Tensor:
        axis, is_inside = self.context_parts.axis, self.context_parts.is_inside
        ranges = even_ranges(len(hidden_states), axis.size)
        sizes, (start, stop) = [stop - start for start, stop in ranges], ranges[axis.rank]

        def share(x: Tensor) -> Tensor:
            return x[start:stop] if is_inside else scatter_to(axis, x, 0, sizes)

        own = super().of_whole_tokens(*map(share, (hidden_states, *args)))
        return (gather_to if is_inside else gather_from)(axis, own, 0, sizes)
