"""Rules for the pipeline stages of an architecture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from oslo_models.sharding.entry import Entries

SCHEDULES = (ONE_F_ONE_B, ZERO_BUBBLE) = ("1f1b", "zb-h1")
"""The schedules of pipeline stages."""
InputPositions = Callable[[Mapping[str, Any]], tuple[int, int]]
"""``arguments of a forward -> (rows, positions)`` of the embedded hidden states."""


@dataclass(frozen=True)
class PipelineRules:
    """How one architecture is split into pipeline stages. Names are module paths in transformers' base model.

    Attributes:
        on_every_stage: the entries of modules outside the blocks that every stage needs.
        embedding_dropouts: the dropouts between the embeddings and the first block.
        disabled_after_first_stage: attributes or arguments that make the base model change the embedded tokens, with
            the values that disable the change. Attributes may belong to a submodule (``"decoder.dropout"``) or to the
            configuration of the model (``"config.mup_enabled"``) or of a submodule (``"decoder.config.hidden_size"``).
        copied_from_first_block: names of entries that only the first block of a stack has. The first block of every
            stage needs a copy of these modules.
        input_positions: for each stack that embeds images or audio, the size of the embedded input.
        early_outputs: modules before the blocks that compute a further output of the model, with its width. The output
            is sent to the last stage.
        continued_blocks: for each stack, the numbers of blocks that read further outputs of the previous block beside
            the hidden states. No stage begins with such a block.
        outputs_per_block: modules among ``on_every_stage`` that output a tuple with an entry per block, with the stack
            of these blocks. A stage reads the entries of its local blocks.
        cache_layers_per_block: number of key-value cache layers that each block fills, one per attention.
        keeps_layer_numbers: whether blocks keep their numbers on every stage. Their cache creates a layer when its
            block uses it, and counts the positions in the first layer.
        kept_on_last_stage: modules before the blocks that the last stage has, too: its task head reads them.
        blocks_of_head: for each stack, the number of blocks at the end of its list that belong to the task head.
        single_stage_reason: why the blocks cannot be split into stages. Empty if they can be split.
    """

    on_every_stage: Entries = field(default_factory=dict)
    embedding_dropouts: Collection[str] = ()
    disabled_after_first_stage: Mapping[str, Any] = field(default_factory=dict)
    copied_from_first_block: Collection[str] = ()
    input_positions: Mapping[str, InputPositions] = field(default_factory=dict)
    early_outputs: Mapping[str, int] = field(default_factory=dict)
    continued_blocks: Mapping[str, Collection[int]] = field(default_factory=dict)
    outputs_per_block: Mapping[str, str] = field(default_factory=dict)
    cache_layers_per_block: int = 1
    keeps_layer_numbers: bool = False
    kept_on_last_stage: Collection[str] = ()
    blocks_of_head: Mapping[str, int] = field(default_factory=dict)
    single_stage_reason: str = ""

    def renamed(self, rename: Callable[[str], str]) -> PipelineRules:
        """Return the rules with other paths of the base model's modules."""
        by_name = ("on_every_stage", "disabled_after_first_stage", "input_positions", "early_outputs")
        changed: dict[str, Any] = {
            each: {rename(key): value for key, value in getattr(self, each).items()}
            for each in (*by_name, "continued_blocks", "blocks_of_head")
        }
        for each in ("embedding_dropouts", "kept_on_last_stage"):
            changed[each] = tuple(map(rename, getattr(self, each)))
        changed["outputs_per_block"] = {rename(key): rename(of) for key, of in self.outputs_per_block.items()}
        return replace(self, **changed)

    def __or__(self, other: PipelineRules) -> PipelineRules:
        return replace(self, **joined_fields(self, other))


def joined_fields(one: Any, two: Any) -> dict[str, Any]:
    """Join the fields of two plans or rules: mappings, collections, rules, the larger number or the first reason."""
    both: dict[str, Any] = {}
    for each in fields(one):
        first, second = getattr(one, each.name), getattr(two, each.name)
        if isinstance(first, Mapping):
            both[each.name] = {**first, **second}
        elif isinstance(first, int):
            both[each.name] = max(first, second)
        elif isinstance(first, PipelineRules):
            both[each.name] = first | second
        else:
            both[each.name] = first or second if isinstance(first, str) else (*first, *second)
    return both
