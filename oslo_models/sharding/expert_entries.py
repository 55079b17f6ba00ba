"""Entries of the sharding plan for experts whose parameters no stack ``gate_up_proj``, ``down_proj`` holds."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def _among_sharers(value: LocalValue, groups: int) -> LocalValue:
    return lambda n, rank: value(n // groups, rank % (n // groups))
