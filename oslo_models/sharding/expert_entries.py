"""Entries of the sharding plan for experts whose parameters no stack ``gate_up_proj``, ``down_proj`` holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oslo_models.sharding.layout import EvenSplit, Layout, check_groups, even_ranges
from oslo_models.sharding.plan import LocalValue, Replicated, SummedModule


@dataclass(frozen=True, kw_only=True)
class RoutedExperts(SummedModule):
    """A module called with hidden states, each token's experts and their weights, that loops over ``num_experts``.

    Its parameters have entries of their own, with an `ExpertWidth` for each expert.

    Args:
        attributes: as of `LocalModule`; values are those of a rank among the ranks that share the width of its experts.
        groups: over how many groups of consecutive ranks they are divided.
    """

    groups: int = 1

    def over_experts(self, groups: int) -> Replicated:
        attributes = {name: _among_sharers(value, groups) for name, value in self.attributes.items()}
        return replace(self, groups=groups, attributes=attributes)


@dataclass(frozen=True)
class StackedColumnParallel(Replicated):
    """A module with one linear layer per expert, ``weight [experts, out, in]``, whose outputs are sharded.

    It is called with inputs in the order of their experts, and with how many each of its ``num_experts`` has.

    Args:
        parts: how many matrices of equal size each layer concatenates.
        groups: over how many groups of consecutive ranks the experts are divided.
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
    """As `StackedColumnParallel`, with sharded inputs, whose outputs are summed over the ranks."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return self._sharded(shape, 2, n)


class SeparateExperts(SummedModule):
    """A container of one MLP per expert, called with hidden states and what a router says of them.

    The outputs of all MLPs are summed over the ranks once. The first layer of each is a `ColumnParallel`, the last one
    a `RowParallel` without bias, both with an `ExpertWidth`: of an expert on other ranks, a rank holds nothing.
    """


def _among_sharers(value: LocalValue, groups: int) -> LocalValue:
    return lambda n, rank: value(n // groups, rank % (n // groups))
