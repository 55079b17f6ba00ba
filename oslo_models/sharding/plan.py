"""Sharding plan of an architecture: one entry per sharded module. Data only, without communication."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from typing_extensions import Self

from oslo_models.sharding.entry import DividedTower as DividedTower
from oslo_models.sharding.entry import Entries as Entries
from oslo_models.sharding.entry import LocalValue as LocalValue
from oslo_models.sharding.entry import Norm as Norm
from oslo_models.sharding.entry import Replicated as Replicated
from oslo_models.sharding.entry import entry_of as entry_of
from oslo_models.sharding.head_counts import attribute_of_heads
from oslo_models.sharding.pipeline_rules import PipelineRules as PipelineRules
from oslo_models.sharding.pipeline_rules import joined_fields


def __getattr__(name: str) -> Any:
    """Import an entry on first access. It stands beside its layer, and layers import this package."""
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("oslo_models.layers.entries"), name)
    globals()[name] = value
    return value


@dataclass(frozen=True)
class Plan:
    """How one architecture is sharded. Names are module paths in transformers' base model.

    Attributes:
        embed: the modules before the blocks.
        blocks: for each stack of blocks (its ``ModuleList``), the modules of one block by their name inside the block.
        head: the modules after the blocks.
        block_overrides: for each stack with heterogeneous blocks, the entries of each block by its number. They extend
            or replace the entries in ``blocks``.
        optional: names of entries for modules that only some task heads, configurations or blocks have.
        single_rank_reason: why no layer can be sharded. Empty if layers can be sharded.
        towers: the plans of towers, such as an encoder of images, whose outputs replace embedded tokens. The modules
            between towers and blocks are among the ``head`` of one of them.
        pipeline: how the blocks are split into pipeline stages.
    """

    embed: Entries
    blocks: Mapping[str, Entries]
    head: Entries
    block_overrides: Mapping[str, Sequence[Entries]] = field(default_factory=dict)
    optional: Collection[str] = ()
    single_rank_reason: str = ""
    towers: Mapping[str, Plan] = field(default_factory=dict)
    pipeline: PipelineRules = field(default_factory=PipelineRules)

    def with_rules(self, **changes: Any) -> Self:
        """Return the plan with some `PipelineRules` replaced."""
        return replace(self, pipeline=replace(self.pipeline, **changes))

    def with_experts_over(self, groups: int) -> Plan:
        """Return the plan with expert parallelism: ``groups`` groups of ranks share the experts."""

        def over(entries: Entries) -> Entries:
            return {name: entry.over_experts(groups) for name, entry in entries.items()}

        blocks = {stack: over(entries) for stack, entries in self.blocks.items()}
        overrides = {stack: [*map(over, each)] for stack, each in self.block_overrides.items()}
        return replace(self, blocks=blocks, block_overrides=overrides)

    def with_divided_images(self) -> Plan:
        """Return the plan with whole towers of images on every rank: the ranks divide the images of a call."""
        towers = {
            name: Plan(embed={}, blocks={}, head={name: DividedTower(), **_outside_of(name, tower.head)})
            for name, tower in self.towers.items()
            if tower.blocks and name not in _SOUND_TOWERS
        }
        return replace(self, towers={**self.towers, **towers})

    def entries_of_blocks(self, stack: str, indices: Sequence[str]) -> Iterator[tuple[str, Entries]]:
        """Yield the number and the entries of some blocks of ``stack``. Call it on the plan of the full model.

        Args:
            indices: the block numbers in the full model, as strings.
        """
        overrides = self.block_overrides.get(stack)
        for index in indices:
            yield index, self.blocks[stack] if overrides is None else {**self.blocks[stack], **overrides[int(index)]}

    def with_towers(self) -> tuple[Plan, ...]:
        """Return this plan and the plans of its towers."""
        return self, *self.towers.values()

    def modules_of_towers(self) -> tuple[str, ...]:
        """Return the outermost modules of the towers and the modules between towers and blocks."""
        between = (key for plan in self.towers.values() for key in plan.head)
        inside = tuple(f"{name}." for name in self.towers)
        return tuple(dict.fromkeys((*self.towers, *(key for key in between if not key.startswith(inside)))))

    def kinds_of_blocks(self) -> list[Entries]:
        """Return the entries of each kind of block, including the blocks of towers."""
        return [
            kind
            for plan in self.with_towers()
            for stack, entries in plan.blocks.items()
            for kind in [{**entries, **own} for own in plan.block_overrides.get(stack, ())] or [{**entries}]
        ]

    def expert_entries(self, stack: str) -> dict[str, Replicated]:
        """Return the entries of the experts inside a block of ``stack``, if it has any."""
        kinds = [self.blocks[stack], *self.block_overrides.get(stack, ())]
        return {name: entry for kind in kinds for name, entry in kind.items() if entry.stacks_experts}

    def has_experts(self) -> bool:
        """Return whether some blocks have a mixture of experts."""
        entries = [entry for kind in self.kinds_of_blocks() for entry in kind.values()]
        return any(entry.over_experts(2) is not entry for entry in entries)

    def max_ranks(self) -> int | None:
        """Return the largest tensor_parallel_size that every entry allows, or ``None`` for any size."""
        limits = [entry.max_ranks() for entries in self.kinds_of_blocks() for entry in entries.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    def check_ranks(self, name: str, config: Any, count: int) -> None:
        """Raise ``ValueError`` if the model ``name`` with this ``config`` cannot be sharded over ``count`` ranks."""
        limit, more = self.max_ranks(), f"tensor_parallel_size={count} is more than"
        if count > 1 and self.single_rank_reason:
            raise ValueError(f"{more} 1, all that {name} allows: {self.single_rank_reason}")
        if limit is not None and count > limit:
            allowed = f"1 to {limit}" if limit > 1 else "1"
            raise ValueError(f"{more} {self._limiting_heads(config, limit)} of {type(config).__name__}; use {allowed}")

    def _limiting_heads(self, config: Any, limit: int) -> str:
        """Describe the heads that allow at most ``limit`` ranks, for a message.

        An ``A_log`` parameter identifies state-space and linear-attention layers.
        """
        modules = {
            (name.split(".")[0], f"{name.split('.')[0]}.A_log" in entries)
            for entries in self.kinds_of_blocks()
            for name, entry in entries.items()
            if entry.max_ranks() == limit
        }
        named = " and ".join(sorted({module for module, _ in modules}))
        if modules and all(is_recurrent for _, is_recurrent in modules):
            return f"the {limit} heads of each {named}"
        if attribute := attribute_of_heads(config, limit):
            return f"{attribute}={limit}"
        return f"the {limit} indivisible group{'s' * (limit > 1)} of heads of each {named}"

    def check_stages(self, name: str, count: int) -> None:
        """Raise ``ValueError`` if the model ``name`` cannot be split into ``count`` pipeline stages at all."""
        if count > 1 and (reason := self.pipeline.single_stage_reason):
            raise ValueError(f"pipeline_parallel_size={count} is more than 1, all that {name} allows: {reason}")

    def under(self, prefix: str) -> Plan:
        """Return the plan of a model that nests the base model under ``prefix``."""
        return self._renamed(lambda name: prefix + name)

    def inside(self, prefix: str) -> tuple[Plan, Entries]:
        """Invert `under`: return the plan of the base model, and the entries of modules outside of it."""

        def split(entries: Entries) -> tuple[dict[str, Replicated], dict[str, Replicated]]:
            own = {key: entry for key, entry in entries.items() if key.startswith(prefix)}
            return own, {key: entry for key, entry in entries.items() if key not in own}

        embed, outside = split(self.embed)
        head, others = split(self.head)
        shared, more = split(self.pipeline.on_every_stage)
        plan = replace(self, embed=embed, head=head).with_rules(on_every_stage=shared)
        return plan._renamed(lambda name: name.removeprefix(prefix)), {**outside, **others, **more}

    def _renamed(self, rename: Callable[[str], str]) -> Plan:
        """Return the plan with other paths of the base model's modules."""
        renamed: dict[str, Any] = {
            name: {rename(key): value for key, value in getattr(self, name).items()}
            for name in ("embed", "blocks", "head", "block_overrides")
        }
        towers = {rename(name): tower._renamed(rename) for name, tower in self.towers.items()}
        return replace(self, **renamed, towers=towers, pipeline=self.pipeline.renamed(rename))

    def __or__(self, other: Plan) -> Plan:
        """Return the plan of a model that runs the blocks of this plan and then the blocks of ``other``."""
        return Plan(**joined_fields(self, other))


_SOUND_TOWERS = ("audio_tower", "encoder")


def _outside_of(tower: str, entries: Entries) -> Entries:
    """Return the entries that are not for modules of a tower."""
    return {key: entry for key, entry in entries.items() if not f"{key}.".startswith(f"{tower}.")}
