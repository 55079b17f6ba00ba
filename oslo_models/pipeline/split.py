"""Cuts a whole model (without memory) down to one stage, on which transformers' forward still runs unchanged.

A later stage is called with the same batch as the first, so that it makes its own masks and positions. In place of its
embedding it has a placeholder that hands out the hidden states received from the stage before; what would be added to
the embedding adds zeros; norms and dropouts that belong to other stages pass on what they get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_models.pipeline.boundaries import place_boundaries
from oslo_models.pipeline.partition import partition
from oslo_models.pipeline.stage import Stack, Stage, stack_of
from oslo_models.sharding.layout import Layout, Range
from oslo_models.sharding.plan import Entries, Plan, entry_of


def cut(
    model: PreTrainedModel,
    plan: Plan,
    prefix: str,
    head: Entries,
    layouts: Mapping[str, Layout],
    index: int,
    count: int,
    blocks_per_stage: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Stage:
    """Keep in ``model`` what stage ``index`` of ``count`` runs, and remove the rest.

    Args:
        layouts: those of the whole model; removed parameters stay in it.
        blocks_per_stage: how many blocks each stage gets; by default they are divided by cost.
        device: that of the stage, if ``model`` is not there yet.

    Raises:
        ValueError: there are more stages than blocks, or ``blocks_per_stage`` does not fit them.
    """
    plan.check_stages(type(model).__name__, count)
    blocks = [
        (stack, name) for stack in plan.blocks for name, _ in model.get_submodule(prefix + stack).named_children()
    ]
    if count > len(blocks):
        raise ValueError(
            f"pipeline_parallel_size={count} is more than the {len(blocks)} blocks of {type(model).__name__}; use 1 to "
            f"{len(blocks)}"
        )
    if blocks_per_stage is not None and (len(blocks_per_stage) != count or sum(blocks_per_stage) != len(blocks)):
        numbers = " and ".join(f"{sum(stack == of for of, _ in blocks)} of {prefix}{stack}" for stack in plan.blocks)
        name = type(model).__name__
        raise ValueError(
            f"blocks_per_stage={list(blocks_per_stage)} has {len(blocks_per_stage)} stages and {sum(blocks_per_stage)} "
            f"blocks; pipeline_parallel_size={count} and the {len(blocks)} blocks of {name} ({numbers}, "
            "in this order) are needed"
        )
    ranges = _ranges(layouts, prefix, head, blocks, count, blocks_per_stage)
    stage_of = {block: stage for stage, (start, stop) in enumerate(ranges) for block in blocks[start:stop]}
    stacks = []
    for stack in plan.blocks:
        stages = [stage_of[block] for block in blocks if block[0] == stack]
        container = (prefix + _container(stack, plan)).rstrip(".")
        before = sum(stage < index for stage in stages)
        positions = plan.input_positions.get(stack)
        stacks.append(
            Stack(container, prefix + stack, stages[0], stages[-1], index in stages, before, positions=positions)
        )
    stage = Stage(index, count, stacks, ranges, tied=dict(model.all_tied_weights_keys))
    owners = _owners(plan, prefix, head, stacks, stage_of, layouts, model.all_tied_weights_keys)
    stage.shared = {name: stages for name, stages in owners.items() if len(stages) > 1}
    stage.fixed = {name for name, param in model.named_parameters() if not param.requires_grad}
    _carry(model, plan, prefix, stage, stage_of)
    for stack, name in blocks:
        if stage_of[stack, name] != index:
            del model.get_submodule(prefix + stack)._modules[name]
    _renumber(model, plan, prefix)
    stage.config = _own_layer_types(model, ranges[index])
    stage.returned = {prefix + key: width for key, width in plan.early_outputs.items()}
    place_boundaries(model, plan, prefix, head, stage, model.device if device is None else device)
    model.all_tied_weights_keys = _tied_here(model, stage.tied)
    return stage


def _container(stack: str, plan: Plan) -> str:
    """The module that does what belongs to a stack, or, where it is the only one, to all that the plan names."""
    owner, names = stack.rpartition(".")[0], (*plan.embed, *plan.head)
    parts = owner.split(".")
    around = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    if len(plan.blocks) == 1:
        return next((path for path in reversed(around) if all(name.startswith(f"{path}.") for name in names)), "")
    alone = [path for path in around if sum(name.startswith(f"{path}.") for name in plan.blocks) == 1] or [owner]
    own = [name for name in plan.embed if name.startswith(f"{alone[0]}.")]
    return next(path for path in reversed(alone) if all(name.startswith(f"{path}.") for name in own))


def _tied_here(model: nn.Module, tied: Mapping[str, str]) -> dict[str, str]:
    """Which names here are other names of which, though what they are tied to may be on another stage."""
    first: dict[str, str] = {}
    here = {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in sorted(names, key=lambda name: name in tied):  # what others are tied to comes first
        source = first.setdefault(tied.get(name, name), name)
        if source != name:
            here[name] = source
    return here


def _ranges(
    layouts: Mapping[str, Layout],
    prefix: str,
    head: Entries,
    blocks: Sequence[tuple[str, str]],
    count: int,
    blocks_per_stage: Sequence[int] | None,
) -> tuple[Range, ...]:
    if blocks_per_stage is not None:
        ends = [sum(blocks_per_stage[: stage + 1]) for stage in range(count)]
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def cost(modules: Iterable[str]) -> float:
        """How many parameters the modules have on all ranks together: ranks of the tp axis have to cut alike."""
        within = tuple(f"{module}." for module in modules)
        return float(sum(prod(layout.shape) for name, layout in layouts.items() if name.startswith(within)))

    costs = [cost([f"{prefix}{stack}.{name}"]) for stack, name in blocks]
    return partition(costs, count, after=cost(name for name in head if not name.endswith((".weight", ".bias"))))


def _owners(
    plan: Plan,
    prefix: str,
    head: Entries,
    stacks: Sequence[Stack],
    stage_of: Mapping[tuple[str, str], int],
    names: Iterable[str],
    tied: Mapping[str, str],
) -> dict[str, tuple[int, ...]]:
    """For every parameter of the whole model, by the name that it is tied to, the stages that hold it."""
    owners: dict[str, set[int]] = {}
    for name in names:
        owners.setdefault(tied.get(name, name), set()).update(_stages_of(name, plan, prefix, head, stacks, stage_of))
    return {name: tuple(sorted(stages)) for name, stages in owners.items()}


def _stages_of(
    name: str,
    plan: Plan,
    prefix: str,
    head: Entries,
    stacks: Sequence[Stack],
    stage_of: Mapping[tuple[str, str], int],
) -> set[int]:
    if entry_of(name, head):
        return {stacks[-1].last}
    for stack in plan.blocks:
        if name.startswith(f"{prefix}{stack}."):
            block, _, inner = name.removeprefix(f"{prefix}{stack}.").partition(".")
            if inner.rpartition(".")[0] in plan.copied_from_first_block:
                return {stage for (other, _), stage in stage_of.items() if other == stack}
            return {stage_of[stack, block]}
    inner = name.removeprefix(prefix)
    if entry_of(inner, plan.on_every_stage):
        return set(stage_of.values())
    if entry := entry_of(inner, plan.embed):
        return {stack_of(entry, prefix, stacks, 0).first}
    return {stack_of(entry_of(inner, plan.head) or inner, prefix, stacks, -1).last}


def _carry(model: nn.Module, plan: Plan, prefix: str, stage: Stage, stage_of: Mapping[tuple[str, str], int]) -> None:
    """Give the first block here what only the first block of the stack has and all blocks of a stage need."""
    for stack in plan.blocks:
        names = [name for (other, name), owner in stage_of.items() if other == stack and owner == stage.index]
        for path in plan.copied_from_first_block:
            if not names or names[0] == "0":
                continue
            owner, _, leaf = path.rpartition(".")
            source = model.get_submodule(f"{prefix}{stack}.0.{owner}")
            target = model.get_submodule(f"{prefix}{stack}.{names[0]}.{owner}")
            setattr(target, leaf, getattr(source, leaf))
            for attribute, value in vars(source).items():  # the flags that say that it is there
                if isinstance(value, bool):
                    setattr(target, attribute, value)
            for parameter, _ in getattr(source, leaf).named_parameters():
                local = f"{prefix}{stack}.{names[0]}.{path}.{parameter}"
                stage.aliases[local] = f"{prefix}{stack}.0.{path}.{parameter}"


def _renumber(model: nn.Module, plan: Plan, prefix: str) -> None:
    """Count layers from zero: a cache has one entry per block that is here."""
    for stack in plan.blocks:
        for position, (name, block) in enumerate(model.get_submodule(prefix + stack).named_children()):
            for module in block.modules():
                for attribute in ("layer_idx", "layer_id"):
                    if isinstance(getattr(module, attribute, None), int):
                        setattr(module, attribute, getattr(module, attribute) - int(name) + position)


def _own_layer_types(model: PreTrainedModel, own: Range) -> dict[str, Any]:
    """Let the configuration speak of the types of the blocks that are here, as their forward counts them from zero.

    Returns:
        What it said before.
    """
    whole = getattr(model.config, "layer_types", None)
    if whole is None:
        return {}
    model.config.layer_types = list(whole[slice(*own)])
    return {"layer_types": whole}
