"""Description of a pipeline stage: its blocks, and the names of its parameters in the full model. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from oslo_models.pipeline.caches import CacheLayers
from oslo_models.pipeline.placeholders import Placeholder, Receiver
from oslo_models.sharding.layer_lists import replaced_values
from oslo_models.sharding.layout import Range
from oslo_models.sharding.model_protocol import TransformersModel
from oslo_models.sharding.pipeline_rules import InputPositions


@dataclass
class Stack:
    """Stack of blocks (an encoder, a decoder) from the view of one stage.

    Attributes:
        name: path of the module that embeds, runs the blocks and applies the final norm.
        blocks: path of its ``ModuleList`` of blocks.
        first, last: first and last stage that run blocks of the stack.
        is_local: whether this stage runs blocks of the stack.
        blocks_before: number of its blocks on earlier stages.
        attentions_before: number of attention weights that its blocks on earlier stages output.
        receiver: placeholder of the embedding, or its copy on the last stage, which outputs the hidden states received
            from the previous stage. ``None`` on the first stage.
        input_positions: see `PipelineRules`. ``None`` for a stack that embeds tokens.
    """

    name: str
    blocks: str
    first: int
    last: int
    is_local: bool
    blocks_before: int = 0
    attentions_before: int = 0
    receiver: Placeholder | Receiver | None = None
    input_positions: InputPositions | None = None


@dataclass
class Stage:
    """Pipeline stage.

    A parameter of the full model may have several names if weights are tied. One of them is its canonical name.

    Attributes:
        index: number of the stage.
        count: number of stages.
        stacks: stacks in the order in which a forward runs them.
        ranges: range of blocks of each stage, counted through all stacks.
        full_names: maps local parameter names to full-model names, if they differ.
        shared_parameters: maps canonical names of parameters on several stages to these stages.
        tied_names: maps further full-model names of tied weights to the canonical name.
        ties_words: ``tie_word_embeddings`` in the configuration, as long as the values of the weights agree with it.
        is_untied: whether formerly tied weights were found to differ.
        layer_lists: local layer lists (one entry per layer of this stage), by module path.
        cache_layers: layers of this stage in a cache for the full model.
        frozen: canonical names of parameters without gradients.
        early_outputs: see `PipelineRules`. Names are full-model names.
        routers: number of routers of each stage.
        records_routers: whether the base model returns router logits, so that logits of other stages can be added.
        num_experts: number of experts that a router chooses from, the width of its logits.
        towers: paths of the modules on the first stage that read images only, such as an encoder and its projector.
        counting_layer: cache layer in which the pipeline counts the positions, if local blocks do not count them.
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
    towers: tuple[str, ...] = ()
    counting_layer: int | None = None

    @contextmanager
    def reading_own_layers(self, model: TransformersModel) -> Iterator[None]:
        """Restrict the layer lists in the configurations of ``model`` to this stage within the block.

        The forward reads the lists by local block number. Outside of the forward they list all layers, since scripts
        read, copy and save ``model.config``.
        """
        with ExitStack() as stack:
            for path, values in self.layer_lists.items():
                stack.enter_context(replaced_values(model.get_submodule(path).config, values))
            yield

    def is_first_holder(self, name: str) -> bool:
        """Return whether this stage is the first with the parameter. Sums over all parameters count it there only."""
        return self.shared_parameters.get(self.canonical_name(name), (self.index,))[0] == self.index

    def canonical_name(self, name: str) -> str:
        """Return the canonical name of the local parameter ``name``."""
        full_name = self.full_names.get(name, name)
        return self.tied_names.get(full_name, full_name)

    @property
    def is_last(self) -> bool:
        return self.index == self.count - 1


def stack_of(entry: str, prefix: str, stacks: Sequence[Stack], default: int) -> Stack:
    """Return the stack of an entry before or after the blocks.

    Args:
        default: position of the stack if the name does not determine it.
    """
    named = [stack for stack in stacks if len(stacks) > 1 and (prefix + entry).startswith(f"{stack.name}.")]
    return named[0] if named else stacks[default]


def hidden_size(model: TransformersModel, blocks: str) -> int:
    """Return the width of hidden states from the innermost module around ``blocks`` with a ``config.hidden_size``.

    Raises:
        ValueError: no configuration has a ``hidden_size``.
    """
    path, found = blocks, None
    while found is None and path:
        path = path.rpartition(".")[0]
        found = getattr(getattr(model.get_submodule(path), "config", None), "hidden_size", None)
    if found is None:
        raise ValueError(
            f"pipeline stages need the width of hidden states, and {type(model.config).__name__} has no hidden_size: "
            'add attribute_map = {"hidden_size": ...} to it, with the name of its width'
        )
    return int(found)
