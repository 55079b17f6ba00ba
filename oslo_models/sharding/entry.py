"""Entries of a plan: how the parameters of one module are laid out over the ranks. Kinds of layers subclass them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from oslo_models.sharding.layout import Layout

LocalValue = Callable[[int, int], int]
"""``(number of ranks, rank) -> value`` of an attribute that counts local heads or elements."""


@dataclass(frozen=True)
class Replicated:
    """Replicated module. Every rank holds it in full, with its submodules, and computes the same output.

    Attributes:
        has_parameters: whether the entry describes parameters. Other entries configure a module only.
        stacks_experts: whether the parameters stack experts, which expert parallelism divides.
        embeds_tokens: whether the module embeds the tokens of the vocabulary.
        is_recurrent: whether the module computes a recurrence over positions.
    """

    has_parameters: ClassVar[bool] = True
    stacks_experts: ClassVar[bool] = False
    embeds_tokens: ClassVar[bool] = False
    is_recurrent: ClassVar[bool] = False

    def covers_submodules(self) -> bool:
        """Return whether the entry also describes the parameters of submodules."""
        return type(self) is Replicated

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        """Return the layout of the parameter ``leaf`` (its last name, such as ``"weight"``) over ``n`` ranks."""
        return Layout(shape)

    def max_ranks(self) -> int | None:
        """Return the largest number of ranks that the entry allows, or ``None`` for any number."""
        return None

    def over_experts(self, groups: int) -> Replicated:
        """Return a copy with experts divided over ``groups`` groups of ranks. Other entries return ``self``."""
        return self


@dataclass(frozen=True)
class Norm(Replicated):
    """Replicated norm. The separate entry allows sequence parallelism to shard it."""


@dataclass(frozen=True)
class DividedTower(Replicated):
    """Replicated tower. Each rank encodes some of the images of a call, and all ranks get all features."""

    def covers_submodules(self) -> bool:
        return True


Entries = Mapping[str, Replicated]


def entry_of(parameter: str, entries: Entries) -> str | None:
    """Return the name of the entry for a parameter: the parameter, its module, or a replicated module around it."""
    module = parameter.rpartition(".")[0]
    for name in (parameter, module):
        if name in entries and entries[name].has_parameters:
            return name
    while module := module.rpartition(".")[0]:
        if module in entries and entries[module].covers_submodules():
            return module
    return None
