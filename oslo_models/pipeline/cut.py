"""Cuts a whole model (without memory) down to one stage, on which transformers' forward still runs unchanged.

A later stage is called with the same batch as the first, so that it makes its own masks and positions. In place of the
embedding of its tokens it has a module that hands out the hidden states received from the stage before; what would be
added to the embedding adds nothing; norms and dropouts that belong to other stages pass on what they get.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from oslo_models.layout import Layout, Range
from oslo_models.plan import Entries, Norm, Plan, Positions, Vocab, Words, entry_of
from oslo_models.stage import partition


class PassOn(nn.Identity):
    """Stands in for a module of another stage. transformers' initialisation asks some of them for their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.bias = torch.empty(0)


class Received(PassOn):
    """Stands in for an embedding: hands out once what was received; what else is looked up adds nothing.

    Args:
        width: that of an embedding of words, by which some models lengthen what they embedded already.
    """

    hidden: Tensor | None = None

    def __init__(self, width: int | None = None) -> None:
        super().__init__()
        self.width = width

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden, self.hidden = self.hidden, None
        if hidden is not None:  # no leaf of the graph: its readers can share a copy of it, or work in place
            return hidden.clone()
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        shape = () if given is None or self.width is None else (*given.shape, self.width)
        return torch.zeros(shape, dtype=self.weight.dtype, device=None if given is None else given.device)


class OfAnotherStage(nn.Module):
    """A module that embeds images or sounds, on a stage that is not its: zeros in the shapes of what it would give.

    Its weights are on the meta device, where it runs as it is: masks are made from these shapes, whatever it computes.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        device = next(value.device for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        args, kwargs = tree_map_only(Tensor, lambda x: x.detach().to("meta"), (args, kwargs))
        with torch.no_grad():
            made = super().forward(*args, **kwargs)
        return tree_map_only(Tensor, lambda x: torch.zeros(x.shape, dtype=x.dtype, device=device), made)


@cache
def _of_another_stage(cls: type[nn.Module]) -> type[nn.Module]:
    """``cls`` on a stage that is not its; initialisation goes by names of classes, so the name stays."""
    return type(cls.__name__, (OfAnotherStage, cls), {"__module__": cls.__module__})


@dataclass
class Stack:
    """One stack of blocks (an encoder, a decoder) as a stage sees it.

    Attributes:
        name: the module that embeds, runs the blocks and normalises.
        first, last: the stages on which the stack begins and ends.
        here: whether this stage runs some of its blocks.
        received: where to put what comes from the stage before, on stages after the first.
        positions: see `Plan`; ``None`` where a stack embeds words.
    """

    name: str
    first: int
    last: int
    here: bool
    received: Received | None = None
    positions: Positions | None = None


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


def cut(
    model: PreTrainedModel,
    plan: Plan,
    prefix: str,
    head: Entries,
    layouts: Mapping[str, Layout],
    index: int,
    count: int,
    blocks_per_stage: Sequence[int] | None = None,
) -> Stage:
    """Keep in ``model`` what stage ``index`` of ``count`` runs, and remove the rest.

    Args:
        layouts: those of the whole model; removed parameters stay in it.
        blocks_per_stage: how many blocks each stage gets; by default they are divided by cost.

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
        stacks.append(Stack(container, stages[0], stages[-1], index in stages, positions=plan.positions.get(stack)))
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
    _replace_ends(model, plan, prefix, head, stage)
    model.all_tied_weights_keys = _tied_here(model, stage.tied)
    return stage


def _container(stack: str, plan: Plan) -> str:
    """The module that does what belongs to a stack, or, where it is the only one, to all that the plan names."""
    owner, names = stack.rpartition(".")[0], (*plan.embed, *plan.head)
    if len(plan.blocks) == 1:
        return owner if all(name.startswith(f"{owner}.") for name in names) else ""
    parts = owner.split(".")
    around = [".".join(parts[: depth + 1]) for depth in range(len(parts))]
    alone = [path for path in around if sum(name.startswith(f"{path}.") for name in plan.blocks) == 1] or [owner]
    own = [name for name in plan.embed if name.startswith(f"{alone[0]}.")]
    return next(path for path in reversed(alone) if all(name.startswith(f"{path}.") for name in own))


class EndsDropout(nn.Dropout):
    """A dropout that a stack applies twice, at its entry and at its exit, of which a stage may have only one."""

    def __init__(self, p: float, at_entry: bool, at_exit: bool) -> None:
        super().__init__(p)
        self.applies = (at_entry, at_exit)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        applies = self.applies[self.calls % 2]
        self.calls += 1
        return super().forward(x) if applies else x


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


def _stack_of(entry: str, prefix: str, stacks: Sequence[Stack], default: int) -> Stack:
    """The stack that an entry before or after the blocks belongs to."""
    named = [stack for stack in stacks if len(stacks) > 1 and (prefix + entry).startswith(f"{stack.name}.")]
    return named[0] if named else stacks[default]


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
            if inner.rpartition(".")[0] in plan.carried:
                return {stage for (other, _), stage in stage_of.items() if other == stack}
            return {stage_of[stack, block]}
    inner = name.removeprefix(prefix)
    if entry_of(inner, plan.beside):
        return set(stage_of.values())
    if entry := entry_of(inner, plan.embed):
        return {_stack_of(entry, prefix, stacks, 0).first}
    return {_stack_of(entry_of(inner, plan.head) or inner, prefix, stacks, -1).last}


def _carry(model: nn.Module, plan: Plan, prefix: str, stage: Stage, stage_of: Mapping[tuple[str, str], int]) -> None:
    """Give the first block here what only the first block of the stack has and all blocks of a stage need."""
    for stack in plan.blocks:
        names = [name for (other, name), owner in stage_of.items() if other == stack and owner == stage.index]
        for path in plan.carried:
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


def _replace_ends(model: nn.Module, plan: Plan, prefix: str, head: Entries, stage: Stage) -> None:
    """Put stand-ins where an embedding, a dropout, a norm or a head belongs to other stages."""
    for key, entry in plan.embed.items():
        stack = _stack_of(key, prefix, stage.stacks, 0)
        if stage.index != stack.first and stack.positions is not None:
            _keep_shapes(model, prefix + key)
        elif stage.index != stack.first and _has(model, prefix + key):
            applied = isinstance(entry, Norm) or isinstance(model.get_submodule(prefix + key), nn.Linear)
            width: Any = model.get_submodule(prefix + key).embedding_dim if isinstance(entry, Vocab) else None
            stand_in = PassOn() if applied else Received(width)
            model.set_submodule(prefix + key, stand_in)
            own = len(stage.stacks) == 1 or (prefix + key).startswith(f"{stack.name}.")
            if isinstance(entry, (Vocab, Words)) and own and isinstance(stand_in, Received):
                stack.received = stand_in
    for name, stack in zip(plan.blocks, stage.stacks, strict=True):
        if stage.index != stack.first and stack.positions is not None:  # in the place of the blocks before
            stack.received, blocks = Received(), model.get_submodule(prefix + name)._modules
            here = dict(blocks)
            blocks.clear()
            blocks.update({"received": stack.received, **here})
    for key, value in plan.neutral.items():
        if stage.index != _stack_of(key, prefix, stage.stacks, 0).first:
            owner, _, name = (prefix + key).rpartition(".")
            module = model.get_submodule(owner)
            if hasattr(module, name):
                setattr(module, name, value)
            else:
                module.register_forward_pre_hook(partial(_with_argument, name, value), with_kwargs=True)
    for key in plan.dropout:
        stack = _stack_of(key, prefix, stage.stacks, 0)
        if not _has(model, prefix + key):
            continue
        dropout = model.get_submodule(prefix + key)
        assert isinstance(dropout, nn.Dropout)
        ends = EndsDropout(dropout.p, stage.index == stack.first, stage.index == stack.last)
        model.set_submodule(prefix + key, ends)
    after = [prefix + key for key in plan.head if stage.index != _stack_of(key, prefix, stage.stacks, -1).last]
    for key in (*after, *(head if not stage.is_last else ())):
        if _has(model, key):
            model.set_submodule(key, PassOn())
            continue
        owner, _, leaf = key.rpartition(".")
        module = model.get_submodule(owner) if _has(model, owner) else model
        if leaf in module._parameters:  # what is optional may be missing
            del module._parameters[leaf]
            setattr(module, leaf, torch.empty(0))


def _with_argument(
    name: str, value: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with one of them, which the call names, replaced."""
    return args, {**kwargs, name: value}


def _keep_shapes(model: nn.Module, path: str) -> None:
    """Let a module, or a parameter, be one of another stage."""
    if not _has(model, path):
        owner, _, leaf = path.rpartition(".")
        if model.get_submodule(owner)._parameters.pop(leaf, None) is not None:
            setattr(model.get_submodule(owner), leaf, torch.zeros((), device="cpu"))
        return
    root = model.get_submodule(path)
    for module in root.modules():
        for tensors in (module._parameters, module._buffers):
            here = {name: tensor for name, tensor in tensors.items() if tensor is not None}
            for name, tensor in here.items():
                delattr(module, name)
                setattr(module, name, tensor.detach().to("meta"))
    root.__class__ = _of_another_stage(type(root))  # type: ignore[arg-type]


def _has(model: nn.Module, path: str) -> bool:
    try:
        return isinstance(model.get_submodule(path), nn.Module)
    except AttributeError:
        return False
