"""Describes a pipeline stage: its blocks, and the names of its parameters in the full model. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from oslo_models.pipeline.caches import CacheLayers
from oslo_models.pipeline.placeholders import Placeholder
from oslo_models.sharding.layer_lists import replaced_values
from oslo_models.sharding.layout import Range
from oslo_models.sharding.plan import InputPositions


@dataclass
class Stack:
    """One stack of blocks (an encoder, a decoder) as a stage sees it.

    Attributes:
        name: the path of the module that embeds, runs the blocks and applies the final norm.
        blocks: the path of its ``ModuleList`` of blocks.
        first, last: the first and the last stage that run blocks of the stack.
        is_local: whether this stage runs blocks of the stack.
        blocks_before: the number of its blocks on earlier stages.
        receiver: the placeholder of the embedding, which outputs the hidden states received from the stage before;
            ``None`` on the first stage.
        input_positions: see `Plan`; ``None`` for a stack that embeds tokens.
    """

    name: str
    blocks: str
    first: int
    last: int
    is_local: bool
    blocks_before: int = 0
    receiver: Placeholder | None = None
    input_positions: InputPositions | None = None


@dataclass
class Stage:
    """One pipeline stage.

    A parameter of the full model may have several names if weights are tied. One of them is its canonical name.

    Attributes:
        index: the number of the stage.
        count: the number of stages.
        stacks: the stacks in the order in which a forward runs them.
        ranges: for each stage its range of blocks, counted through all stacks.
        full_names: for parameters whose name differs in the full model, from the name here to that in the full model.
        shared_parameters: for parameters that several stages hold, from the canonical name to those stages.
        tied_names: for tied weights, from each other name in the full model to the canonical name.
        ties_words: ``tie_word_embeddings`` in the configuration, as long as the values agree with it.
        is_untied: whether weights were found to differ that were tied before.
        layer_lists: for the configuration of some modules, the values with one entry per layer, for the layers here.
        cache_layers: the layers of this stage in a cache for the full model.
        frozen: the canonical names of parameters that get no gradient.
        early_outputs: see `Plan`; with the names of the full model.
        routers: for each stage the number of its routers.
        records_routers: whether the base model returns the logits of its routers, so that the others can be added.
        num_experts: the width of a router's logits: how many experts it chooses from.
        counting_layer: the layer of the cache in which the pipeline counts the positions, where local blocks do not.
    """

    index: int
    count: int
    stacks: list[Stack]
    ranges: tuple[Range, ...]
    full_names: dict[str, str] = field(default_factory=dict)
    shared_parameters: dict[str, tuple[int, ...]] = field(default_factory=dict)
    tied_names: dict[str, str] = field(default_factory=dict)
    ties_words: bool | None = None
    is_untied: bool = False
    layer_lists: dict[str, dict[str, Sequence[Any]]] = field(default_factory=dict)
    cache_layers: CacheLayers | None = None
    frozen: set[str] = field(default_factory=set)
    early_outputs: dict[str, int] = field(default_factory=dict)
    routers: tuple[int, ...] = ()
    records_routers: bool = False
    num_experts: int = 0
    counting_layer: int | None = None

    @contextmanager
    def reading_own_layers(self, model: Any) -> Iterator[None]:
        """Within the block, the configurations of ``model`` list the layers of this stage only.

        The forward reads them by the numbers that blocks have here. Outside of the forward they list all layers, as
        scripts read, copy and save ``model.config``.
        """
        with ExitStack() as stack:
            for path, values in self.layer_lists.items():
                stack.enter_context(replaced_values(model.get_submodule(path).config, values))
            yield

    def is_first_holder(self, name: str) -> bool:
        """Whether this stage is the first that holds the parameter; sums over all parameters count it there only."""
        return self.shared_parameters.get(self.canonical_name(name), (self.index,))[0] == self.index

    def canonical_name(self, name: str) -> str:
        """The canonical name of the parameter that is called ``name`` on this stage."""
        full_name = self.full_names.get(name, name)
        return self.tied_names.get(full_name, full_name)

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stack_of(entry: str, prefix: str, stacks: Sequence[Stack], default: int) -> Stack:
    """The stack to which an entry before or after the blocks belongs.

    Args:
        default: the position of the stack if the name does not tell.
    """
    named = [stack for stack in stacks if len(stacks) > 1 and (prefix + entry).startswith(f"{stack.name}.")]
    return named[0] if named else stacks[default]


def hidden_size(model: Any, blocks: str) -> int:
    """The width of hidden states, in the configuration of the innermost module around some blocks that has it.

    Raises:
        ValueError: none has.
    """
    path, found = blocks, None
    while found is None and path:
        path = path.rpartition(".")[0]
        found = getattr(getattr(model.get_submodule(path), "config", None), "hidden_size", None)
    if found is None:
        raise ValueError(
            f"pipeline stages need the width of hidden states, and {type(model.config).__name__} has no hidden_size: "
            'add attribute_map = {"hidden_size": ...} to it, with the name that it has there'
        )
    return int(found)
