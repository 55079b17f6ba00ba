"""Plan entries for experts without stacked ``gate_up_proj`` and ``down_proj`` parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oslo_models.sharding.layout import EvenSplit, Layout, check_groups, even_ranges
from oslo_models.sharding.plan import LocalValue, Replicated, SummedModule


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(SummedModule):
    """Module that takes hidden states, each token's experts and their weights, and loops over ``num_experts``.

    Its parameters have separate entries, with an `ExpertWidth` for each expert.

    Args:
        attributes: see `LocalModule`. Values count ranks within the group that shares the width of an expert.
        groups: number of groups of consecutive ranks over which the experts are divided.
    """

    groups: int = 1

    def over_experts(self, groups: int) -> Replicated:
        attributes = {name: _among_sharers(value, groups) for name, value in self.attributes.items()}
        return replace(self, groups=groups, attributes=attributes)


@dataclass(frozen=True)
class StackedColumnParallel(Replicated):
    """Module with one linear layer per expert, ``weight [experts, out, in]``, and sharded output features.

    Its forward takes the inputs sorted by expert and the number of inputs per expert (``num_experts`` numbers).

    Args:
        parts: number of matrices of equal size that each layer concatenates.
        groups: number of groups of consecutive ranks over which the experts are divided.
    """

    parts: int = 1
    groups: int = 1

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, 1, n)

    def over_experts(self, groups: int) -> Replicated:
        return replace(self, groups=groups)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        check_groups(self.groups, shape[0], n)
        share = n // self.groups
        width = Layout.sharded(shape, dim, (EvenSplit(shape[dim] // self.parts),) * self.parts, share)
        return width if self.groups == 1 else width.over_groups(even_ranges(shape[0], self.groups), share)


@dataclass(frozen=True)
class StackedRowParallel(StackedColumnParallel):
    """Like `StackedColumnParallel`, with sharded input features. The outputs are all-reduced."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, 2, n)


class SeparateExperts(SummedModule):
    """Container of one MLP per expert. Its forward takes hidden states and the outputs of a router.

    The outputs of all MLPs are all-reduced together. The first layer of each MLP is a `ColumnParallel`, the last layer
    a `RowParallel` without bias. Both have an `ExpertWidth`, so a rank stores no elements of remote experts.
    """


def _among_sharers(value: LocalValue, groups: int) -> LocalValue:
    return lambda n, rank: value(n // groups, rank % (n // groups))
