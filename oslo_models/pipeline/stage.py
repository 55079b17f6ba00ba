"""What a pipeline stage is: which blocks it has, and what its parameters are called in the whole model. Data only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from oslo_models.pipeline.placeholders import Placeholder
from oslo_models.sharding.layout import Range
from oslo_models.sharding.plan import InputPositions


@dataclass
class Stack:
    """One stack of blocks (an encoder, a decoder) as a stage sees it.

    Attributes:
        name: the module that embeds, runs the blocks and normalises.
        blocks: the list of its blocks.
        first, last: the stages on which the stack begins and ends.
        here: whether this stage runs some of its blocks.
        before: how many of its blocks are on stages before this one.
        received: what hands out the hidden states of the stage before, on stages after the first.
        positions: see `Plan`; ``None`` where a stack embeds words.
    """

    name: str
    blocks: str
    first: int
    last: int
    here: bool
    before: int = 0
    received: Placeholder | None = None
    positions: InputPositions | None = None


@dataclass
class Stage:
    """What one pipeline stage is.

    Attributes:
        index, count: which stage of how many.
        stacks: the stacks in the order in which a forward runs them.
        ranges: for each stage the range of blocks, counted through all stacks.
        aliases: names that a parameter has here and the one that it has in the whole model, where they differ.
        shared: parameters that several stages hold: their name in the whole model, and those stages.
        tied: names of the whole model that are other names of a parameter, and the name it is known by.
        config: what the configuration of the whole model says where that of the stage says otherwise.
        fixed: tables among the shared parameters, by the same names, that no gradient reaches.
        returned: see `Plan`; by the names of the whole model.
    """

    index: int
    count: int
    stacks: list[Stack]
    ranges: tuple[Range, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    shared: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    returned: dict[str, int] = field(default_factory=dict)

    def counts(self, name: str) -> bool:
        """Whether this stage is the first of those that hold the parameter, so that it is the one to count it."""
        return self.shared.get(self.root(name), (self.index,))[0] == self.index

    def root(self, name: str) -> str:
        """The name by which the whole model knows a parameter, that it is tied to if it is."""
        whole = self.aliases.get(name, name)
        return self.tied.get(whole, whole)

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stack_of(entry: str, prefix: str, stacks: Sequence[Stack], default: int) -> Stack:
    """The stack that an entry before or after the blocks belongs to."""
    named = [stack for stack in stacks if len(stacks) > 1 and (prefix + entry).startswith(f"{stack.name}.")]
    return named[0] if named else stacks[default]
