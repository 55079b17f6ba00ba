"""Reduces a full model on the meta device to one pipeline stage. transformers' forward runs unchanged on it.

Every stage is called with the same batch and computes masks and positions locally. On later stages, placeholders
replace the modules of other stages. The placeholder of the embedding outputs the hidden states received from the
previous stage. Placeholders of other embeddings, which are added to it, return zeros. Placeholders of norms and
dropouts return their input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.layers.experts import Experts
from oslo_models.pipeline.boundaries import place_boundaries
from oslo_models.pipeline.caches import CacheLayers
from oslo_models.pipeline.partition import partition
from oslo_models.pipeline.stage import Stack, Stage, hidden_size, stack_of
from oslo_models.pipeline.stage_blocks import StageBlocks
from oslo_models.sharding.layer_lists import layer_lists
from oslo_models.sharding.layout import Layout, Range
from oslo_models.sharding.model_protocol import TransformersModel
from oslo_models.sharding.plan import Entries, Plan, Replicated, entry_of


def split_stage(
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
    """Keep the modules of ``model`` that stage ``index`` of ``count`` runs, and remove the others.

    Args:
        plan: plan of the architecture.
        prefix: path prefix of the base model in ``model``.
        head: entries of the task head.
        layouts: layouts of the full model's parameters and sharded buffers.
        blocks_per_stage: number of blocks of each stage. By default, blocks are partitioned by cost.
        device: device of the stage, if ``model`` is not there yet.

    Raises:
        ValueError: there are more stages than blocks, ``blocks_per_stage`` does not match the model, or a model with a
            task head has no base model or no hidden size.
    """
    plan.check_stages(type(model).__name__, count)
    blocks, of_head = _blocks_of(model, plan, prefix)
    _check_counts(type(model).__name__, plan, prefix, blocks, count, blocks_per_stage)
    continued = plan.pipeline.continued_blocks
    starts = [i for i, (stack, name) in enumerate(blocks) if int(name) not in continued.get(stack, ())]
    _check_starts(type(model).__name__, starts, count, blocks_per_stage)
    buffers = dict(model.named_buffers())
    parameters = {name: layout for name, layout in layouts.items() if name not in buffers}
    active = _active_parameters(model.config, plan, prefix, head, [*blocks, *of_head], parameters)
    after = [*head, *(f"{prefix}{stack}.{name}" for stack, name in of_head)]
    ranges = _block_ranges(active, prefix, plan.modules_of_towers(), after, blocks, starts, count, blocks_per_stage)
    stage_of = {block: stage for stage, (start, stop) in enumerate(ranges) for block in blocks[start:stop]}
    stage_of |= dict.fromkeys(of_head, count - 1)
    stacks = _stacks(plan, prefix, blocks, stage_of, index)
    if not all(stack.name for stack in stacks) and "labels" in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"pipeline_parallel_size={count}: the blocks of {type(model).__name__} are not inside a base model that "
            "returns hidden states. Put the modules before the head into a base model, and name its attribute in "
            "base_model_prefix, as transformers does"
        )
    for each in stacks:
        hidden_size(model, each.blocks)  # raises if the size is unknown
    tied = dict(model.all_tied_weights_keys)
    towers = tuple(prefix + name for name in plan.modules_of_towers())
    stage = Stage(index, count, stacks, ranges, tied_names=tied, towers=towers)
    stage.ties_words = getattr(model.config, "tie_word_embeddings", None)
    holders = _holding_stages(plan, prefix, head, stacks, stage_of, layouts, tied)
    stage.shared_parameters = {name: stages for name, stages in holders.items() if len(stages) > 1}
    stage.frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
    _copy_first_block_modules(model, plan, prefix, stage, stage_of)
    _count_routers(model, stage, plan, prefix, blocks, layouts)
    for each in stacks:
        each.attentions_before = _count_attentions(model, each)
    for stack, name in stage_of:
        if stage_of[stack, name] != index:
            del model.get_submodule(prefix + stack)._modules[name]
    for each in stacks:
        if type(block_list := model.get_submodule(each.blocks)) is nn.ModuleList:
            StageBlocks.mark(block_list, sum(f"{prefix}{of}" == each.blocks for of, _ in blocks))
    if not plan.pipeline.keeps_layer_numbers:
        _renumber_layers(model, plan, prefix)
    stage.counting_layer = _counting_layer(model.config, plan, ranges[index])
    counts = {stack.blocks: sum(f"{prefix}{of}" == stack.blocks for of, _ in blocks) for stack in stacks}
    stage.layer_lists = _own_layer_lists(model, plan, stage, counts)
    stage.cache_layers = _cache_layers(model.config, plan, stage, counts)
    stage.early_outputs = {prefix + key: width for key, width in plan.pipeline.early_outputs.items()}
    place_boundaries(model, plan, prefix, head, stage, model.device if device is None else device)
    model.all_tied_weights_keys = _local_tied_keys(model, stage.tied_names)
    return stage


def _blocks_of(model: nn.Module, plan: Plan, prefix: str) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the stack and the name of each block that stages share, and of each block of the task head."""
    shared, of_head = list[tuple[str, str]](), list[tuple[str, str]]()
    for stack in plan.blocks:
        blocks = [(stack, name) for name, _ in model.get_submodule(prefix + stack).named_children()]
        count = len(blocks) - plan.pipeline.blocks_of_head.get(stack, 0)
        shared += blocks[:count]
        of_head += blocks[count:]
    return shared, of_head


def _check_counts(
    name: str,
    plan: Plan,
    prefix: str,
    blocks: Sequence[tuple[str, str]],
    count: int,
    blocks_per_stage: Sequence[int] | None,
) -> None:
    """Raise ``ValueError`` if the number of stages does not match the blocks of the model ``name``."""
    if count > len(blocks):
        raise ValueError(
            f"pipeline_parallel_size={count} is more than the {len(blocks)} blocks of {name}; use 1 to {len(blocks)}"
        )
    if blocks_per_stage is not None and (len(blocks_per_stage) != count or sum(blocks_per_stage) != len(blocks)):
        numbers = " and ".join(f"{sum(stack == of for of, _ in blocks)} of {prefix}{stack}" for stack in plan.blocks)
        raise ValueError(
            f"blocks_per_stage={list(blocks_per_stage)} has {len(blocks_per_stage)} stages and {sum(blocks_per_stage)} "
            f"blocks; pipeline_parallel_size={count} and the {len(blocks)} blocks of {name} ({numbers}, "
            "in this order) are needed"
        )


def _check_starts(name: str, starts: Sequence[int], count: int, blocks_per_stage: Sequence[int] | None) -> None:
    """Raise ``ValueError`` if a stage would begin with a block that reads further outputs of the previous block.

    Args:
        starts: blocks with which a stage may begin, counted through all stacks.
    """
    if count > len(starts):
        raise ValueError(
            f"pipeline_parallel_size={count}: a stage of {name} can only begin with block "
            f"{' or '.join(map(str, starts))}, since the others read results of the block before them; use "
            f"{f'1 to {len(starts)}' if len(starts) > 1 else 1}"
        )
    firsts = [] if blocks_per_stage is None else [sum(blocks_per_stage[:stage]) for stage in range(count)]
    if wrong := sorted({*firsts} - {*starts}):
        raise ValueError(
            f"blocks_per_stage={list(blocks_per_stage or ())}: a stage would begin with block {wrong[0]} of {name}, "
            f"which reads results of the block before it; let stages begin with some of the blocks {starts}"
        )


def _stacks(
    plan: Plan, prefix: str, blocks: Sequence[tuple[str, str]], stage_of: Mapping[tuple[str, str], int], index: int
) -> list[Stack]:
    """Return the stacks of the model from the view of stage ``index``."""
    stacks = []
    for stack in plan.blocks:
        stages = [stage_of[block] for block in blocks if block[0] == stack]
        module = (prefix + _stack_module(stack, plan)).rstrip(".")
        before = sum(stage < index for stage in stages)
        positions = plan.pipeline.input_positions.get(stack)
        stacks.append(
            Stack(module, prefix + stack, stages[0], stages[-1], index in stages, before, input_positions=positions)
        )
    return stacks


def _stack_module(stack: str, plan: Plan) -> str:
    """Return the path of the module that embeds, runs the blocks of a stack and applies the final norm.

    This is the smallest module around the blocks that contains the stack's entries before the blocks. For a single
    stack, it also contains the entries after the blocks. It may be the model itself (an empty path).
    """
    owner, names = stack.rpartition(".")[0], (*plan.embed, *plan.head)
    parts = owner.split(".")
    around = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    if len(plan.blocks) == 1:
        return next((path for path in reversed(around) if all(name.startswith(f"{path}.") for name in names)), "")
    candidates = [path for path in around if sum(name.startswith(f"{path}.") for name in plan.blocks) == 1] or [owner]
    embeddings = [name for name in plan.embed if name.startswith(f"{candidates[0]}.")]
    return next(path for path in reversed(candidates) if all(name.startswith(f"{path}.") for name in embeddings))


def _local_tied_keys(model: nn.Module, tied: Mapping[str, str]) -> dict[str, str]:
    """Return the tied weights on this stage, as a mapping from each further name to the first local name."""
    first: dict[str, str] = {}
    local = {}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in sorted(names, key=lambda name: name in tied):  # canonical names come first
        source = first.setdefault(tied.get(name, name), name)
        if source != name:
            local[name] = source
    return local


def _active_parameters(
    config: Any,
    plan: Plan,
    prefix: str,
    head: Entries,
    blocks: Sequence[tuple[str, str]],
    layouts: Mapping[str, Layout],
) -> dict[str, float]:
    """Return the number of elements of each parameter that compute a token. Experts count by the chosen share.

    The numbers refer to unsharded parameters, since all ranks of the tp axis must partition the blocks alike.
    """
    active = {name: float(prod(layout.shape)) for name, layout in layouts.items()}
    chosen = getattr(config.get_text_config(), "num_experts_per_tok", None)
    experts = [f"{prefix}{stack}.{block}.{entry}" for stack, block in blocks for entry in plan.expert_entries(stack)]
    experts += [entry for entry, kind in head.items() if kind.stacks_experts]
    for entry in experts:
        for name in layouts:
            if isinstance(chosen, int) and name.startswith(f"{entry}."):
                active[name] *= min(1.0, chosen / layouts[name].shape[0])
    return active


def _block_ranges(
    sizes: Mapping[str, float],
    prefix: str,
    towers: Iterable[str],
    head: Iterable[str],
    blocks: Sequence[tuple[str, str]],
    starts: Sequence[int],
    count: int,
    blocks_per_stage: Sequence[int] | None,
) -> tuple[Range, ...]:
    if blocks_per_stage is not None:
        ends = [sum(blocks_per_stage[: stage + 1]) for stage in range(count)]
        return tuple(zip((0, *ends[:-1]), ends, strict=True))

    def cost(modules: Iterable[str]) -> float:
        within = tuple(f"{module}." for module in modules)
        return sum(size for name, size in sizes.items() if name.startswith(within))

    costs = [cost([f"{prefix}{stack}.{name}"]) for stack, name in blocks]
    before = cost(prefix + name for name in towers)
    bounds = [*starts, len(blocks)]
    joined = [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
    after = cost(name for name in head if not name.endswith((".weight", ".bias")))
    return tuple((bounds[start], bounds[stop]) for start, stop in partition(joined, count, before, after))


def _holding_stages(
    plan: Plan,
    prefix: str,
    head: Entries,
    stacks: Sequence[Stack],
    stage_of: Mapping[tuple[str, str], int],
    names: Iterable[str],
    tied: Mapping[str, str],
) -> dict[str, tuple[int, ...]]:
    """Return the stages that hold each parameter of the full model, by canonical name."""
    holders: dict[str, set[int]] = {}
    for name in names:
        holders.setdefault(tied.get(name, name), set()).update(_stages_of(name, plan, prefix, head, stacks, stage_of))
    return {name: tuple(sorted(stages)) for name, stages in holders.items()}


def _stages_of(
    name: str,
    plan: Plan,
    prefix: str,
    head: Entries,
    stacks: Sequence[Stack],
    stage_of: Mapping[tuple[str, str], int],
) -> set[int]:
    """Return the stages that hold the parameter ``name`` of the full model."""
    if entry_of(name, head):
        return {stacks[-1].last}
    for stack in plan.blocks:
        if name.startswith(f"{prefix}{stack}."):
            block, _, inner = name.removeprefix(f"{prefix}{stack}.").partition(".")
            if inner.rpartition(".")[0] in plan.pipeline.copied_from_first_block:
                return {stage for (other, _), stage in stage_of.items() if other == stack}
            return {stage_of[stack, block]}
    inner = name.removeprefix(prefix)
    if entry_of(inner, plan.pipeline.on_every_stage):
        return set(stage_of.values())
    if entry := entry_of(inner, plan.embed):
        first, kept = stack_of(entry, prefix, stacks, 0).first, entry in plan.pipeline.kept_on_last_stage
        return {first, max(stage_of.values())} if kept else {first}
    if entry_of(inner, dict.fromkeys(plan.modules_of_towers(), Replicated())):
        return {stacks[0].first}
    return {stack_of(entry_of(inner, plan.head) or inner, prefix, stacks, -1).last}


def _count_routers(
    model: TransformersModel,
    stage: Stage,
    plan: Plan,
    prefix: str,
    blocks: Sequence[tuple[str, str]],
    layouts: Mapping[str, Layout],
) -> None:
    """Record the number of routers of each stage and their number of experts. ``model`` must still have every block."""
    recorded = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    router: Any = getattr(recorded, "target_class", recorded)
    # Routers also choose identity experts, which have no weights.
    experts = [
        [
            layouts[name].shape[0] + entry.identities
            for key, entry in plan.expert_entries(stack).items()
            if isinstance(entry, Experts) and (name := f"{prefix}{stack}.{block}.{key}.down_proj") in layouts
        ]
        for stack, block in blocks
    ]
    counts_by_class = isinstance(router, type) and issubclass(router, nn.Module)
    stage.records_routers = recorded is not None and (any(experts) or counts_by_class)
    if counts_by_class:
        inside = [model.get_submodule(f"{prefix}{stack}.{block}").modules() for stack, block in blocks]
        routers = [[each for each in modules if isinstance(each, router)] for modules in inside]
        if not any(experts):  # experts without stacked weights
            experts = [[*map(_outputs_of, own)] for own in routers]
        elif any(routers):  # two mixtures of ERNIE 4.5 VL have logits together
            experts = [counts[: len(own)] for counts, own in zip(experts, routers, strict=True)]
    stage.routers = tuple(sum(map(len, experts[slice(*local)])) for local in stage.ranges)
    stage.num_experts = max((count for counts in experts for count in counts), default=0)


def _outputs_of(router: nn.Module) -> int:
    """Return the number of experts of a router with one weight matrix."""
    return next(param.shape[0] for param in router.parameters() if param.dim() == 2)


def _count_attentions(model: nn.Module, stack: Stack) -> int:
    """Return the number of attention weights of the blocks of earlier stages. ``model`` must still have every block.

    transformers records the weights of every module of some classes: recurrent blocks have none, and blocks of
    LongCat-Flash have two. Base models without such records return an entry for each block.
    """
    owner, recorded = stack.blocks, None
    while owner and recorded is None:
        owner = owner.rpartition(".")[0]
        recorded = (getattr(model.get_submodule(owner), "_can_record_outputs", None) or {}).get("attentions")
    records: list[Any] = recorded if isinstance(recorded, list) else [recorded]
    classes = [(getattr(each, "target_class", each), getattr(each, "layer_name", None) or "") for each in records]
    if not all(isinstance(kind, type) for kind, _ in classes):
        return stack.blocks_before
    blocks = [*model.get_submodule(stack.blocks).named_children()][: stack.blocks_before]
    return sum(
        isinstance(module, kind) and f".{within.strip('.')}".rstrip(".") in f".{stack.blocks}.{block}.{name}."
        for block, part in blocks
        for name, module in part.named_modules()
        for kind, within in classes
    )


def _copy_first_block_modules(
    model: nn.Module, plan: Plan, prefix: str, stage: Stage, stage_of: Mapping[tuple[str, str], int]
) -> None:
    """Copy modules that all blocks use but only the first block has to the first block of this stage."""
    for stack in plan.blocks:
        names = [name for (other, name), owner in stage_of.items() if other == stack and owner == stage.index]
        for path in plan.pipeline.copied_from_first_block:
            if not names or names[0] == "0" or path not in plan.blocks[stack]:
                continue
            owner, _, leaf = path.rpartition(".")
            source = model.get_submodule(f"{prefix}{stack}.0.{owner}")
            target = model.get_submodule(f"{prefix}{stack}.{names[0]}.{owner}")
            setattr(target, leaf, getattr(source, leaf))
            for attribute, value in vars(source).items():  # flags such as `has_relative_attention_bias`
                if isinstance(value, bool):
                    setattr(target, attribute, value)
            for parameter, _ in getattr(source, leaf).named_parameters():
                local = f"{prefix}{stack}.{names[0]}.{path}.{parameter}"
                stage.full_names[local] = f"{prefix}{stack}.0.{path}.{parameter}"


def _renumber_layers(model: nn.Module, plan: Plan, prefix: str) -> None:
    """Number the layers of this stage from zero, since a cache has entries for local blocks only."""
    for stack in plan.blocks:
        for position, (name, block) in enumerate(model.get_submodule(prefix + stack).named_children()):
            for module in block.modules():
                before = int(name) - position
                if module is not block:
                    before *= plan.pipeline.cache_layers_per_block
                for attribute in ("layer_idx", "layer_id"):
                    if isinstance(getattr(module, attribute, None), int):
                        setattr(module, attribute, getattr(module, attribute) - before)


_WITHOUT_LENGTH = {"conv", "linear_attention", "moe", "mlp"}
"""Types of blocks with cache layers that do not record the number of positions."""


def _counting_layer(config: Any, plan: Plan, local: Range) -> int | None:
    """Return the cache layer in which the pipeline counts the positions, or ``None`` if a local block counts them."""
    full = getattr(config.get_text_config(decoder=True), "layer_types", None)
    if plan.pipeline.keeps_layer_numbers:
        return 0 if local[0] and (full is None or full[0] not in _WITHOUT_LENGTH) else None
    own = full[slice(*local)] if full is not None else ()
    return len(own) if own and not set(own) - _WITHOUT_LENGTH else None


def _cache_layers(config: Any, plan: Plan, stage: Stage, counts: Mapping[str, int]) -> CacheLayers | None:
    """Return the layers of this stage in a cache for the full model, or ``None`` if blocks keep their numbers."""
    if plan.pipeline.keeps_layer_numbers:
        return None
    start, stop, total = *stage.ranges[stage.index], stage.ranges[-1][1]
    if config.is_encoder_decoder:
        before = total - counts[stage.stacks[-1].blocks]
        start, stop, total = max(start - before, 0), max(stop - before, 0), total - before
    per_block = plan.pipeline.cache_layers_per_block
    return CacheLayers(start * per_block, stop * per_block, total * per_block, stage.counting_layer)


def _own_layer_lists(
    model: PreTrainedModel, plan: Plan, stage: Stage, counts: Mapping[str, int]
) -> dict[str, dict[str, Sequence[Any]]]:
    """Return the layer lists for the layers of this stage, by the path of the module that owns the configuration.

    Args:
        counts: number of blocks of each stack of the full model, by the path of its blocks.
    """
    found: dict[str, dict[str, Sequence[Any]]] = {}
    for stack in stage.stacks:
        owner = stack.blocks.rpartition(".")[0]
        while owner and not hasattr(model.get_submodule(owner), "config"):
            owner = owner.rpartition(".")[0]
        config = model.get_submodule(owner).config
        if not stack.is_local or not isinstance(config, PreTrainedConfig):
            continue
        per_block, count = plan.pipeline.cache_layers_per_block, counts[stack.blocks]
        names = (int(name) for name, _ in model.get_submodule(stack.blocks).named_children())
        here = sum(name < counts[stack.blocks] for name in names)  # without blocks of the task head
        for scale in {1, per_block}:
            start, stop = stack.blocks_before * scale, (stack.blocks_before + here) * scale
            lists = {name: list(value[start:stop]) for name, value in layer_lists(config, count * scale).items()}
            types = getattr(type(config), "attribute_map", {}).get("layer_types", "layer_types")
            if types in lists and stage.counting_layer == len(lists[types]):
                lists[types].append("full_attention")  # caches get an additional layer
            found.setdefault(owner, {}).update(lists)
    return {owner: lists for owner, lists in found.items() if lists}
