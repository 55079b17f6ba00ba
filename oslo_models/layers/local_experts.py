"""Base of MoE layers with other experts than stacked ``gate_up_proj`` and ``down_proj`` parameters."""

from __future__ import annotations

from typing import Any

from oslo_models.layers.kinds import ShardedModule, ShardingContext
from oslo_models.sharding.layout import even_ranges


class LocalExperts(ShardedModule):
    """Module with the local experts. Each group of ranks holds some of the experts.

    Attributes:
        first: number of the first local expert.
        num_experts: number of local experts.
        over_ranks: whether other ranks have other experts.
    """

    first: int
    num_experts: int
    over_ranks: bool

    def configure(self, entry: Any, context: ShardingContext) -> None:
        super().configure(entry, context)
        groups = entry.groups
        first, stop = even_ranges(self.num_experts, groups)[self.tp.rank * groups // self.tp.size]
        self.first, self.num_experts, self.over_ranks = first, stop - first, groups > 1

    def own_sizes(self, sizes: list[int]) -> tuple[int, list[int]]:
        """Return the number of rows before the local experts, and the number of rows of each local expert."""
        return sum(sizes[: self.first]), sizes[self.first : self.first + self.num_experts]
