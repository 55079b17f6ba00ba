"""Puts placeholders where an embedding, a dropout, a norm or a head of a model belongs to other pipeline stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from oslo_models.pipeline.placeholders import BoundaryDropout, Output, Placeholder, placeholder, without_memory
from oslo_models.pipeline.stage import Stage, stack_of
from oslo_models.sharding.plan import Entries, Norm, Plan, Replicated, ReplicatedEmbedding, VocabParallel


def place_boundaries(
    model: nn.Module, plan: Plan, prefix: str, head: Entries, stage: Stage, device: torch.device
) -> None:
    """Put placeholders where an embedding, a dropout, a norm or a head belongs to other stages.

    Args:
        device: that of the stage.
    """
    for key, entry in plan.embed.items():
        stack = stack_of(key, prefix, stage.stacks, 0)
        if stage.index == stack.first:
            continue
        output = _output(entry, _find(model, prefix + key), of_words=stack.positions is None)
        made = _replace(model, prefix + key, device, output)
        own = len(stage.stacks) == 1 or (prefix + key).startswith(f"{stack.name}.")
        if own and made is not None and output is Output.ZEROS:  # of several, the last, whose output the blocks get
            stack.received = made
    for key, value in plan.disabled_after_first_stage.items():
        if stage.index != stack_of(key, prefix, stage.stacks, 0).first:
            owner, _, name = (prefix + key).rpartition(".")
            module = model.get_submodule(owner)
            if hasattr(module, name):
                setattr(module, name, value)
            else:
                module.register_forward_pre_hook(partial(_with_argument, name, value), with_kwargs=True)
    for key in plan.embedding_dropouts:
        stack = stack_of(key, prefix, stage.stacks, 0)
        dropout = _find(model, prefix + key)
        if dropout is None:
            continue
        assert isinstance(dropout, nn.Dropout)
        ends = BoundaryDropout(dropout.p, stage.index == stack.first, stage.index == stack.last)
        model.set_submodule(prefix + key, ends)
    after = [prefix + key for key in plan.head if stage.index != stack_of(key, prefix, stage.stacks, -1).last]
    for key in (*after, *(head if not stage.is_last else ())):
        _replace(model, key, device, Output.INPUT)


def _output(entry: Replicated, module: nn.Module | None, of_words: bool) -> Output:
    """What a placeholder before the blocks returns, for a stack that embeds words, or an image or a sound."""
    if isinstance(entry, Norm) or (of_words and isinstance(module, nn.Linear)):
        return Output.INPUT
    return Output.ADDEND if of_words and not isinstance(entry, (VocabParallel, ReplicatedEmbedding)) else Output.ZEROS


def _with_argument(
    name: str, value: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with one of them, which the call names, replaced."""
    return args, {**kwargs, name: value}


def _replace(model: nn.Module, path: str, device: torch.device, output: Output) -> Placeholder | None:
    """Let a module, a parameter or a buffer be one of another stage; what is optional may be missing.

    Returns:
        What takes the place of a module.
    """
    module = _find(model, path)
    if module is not None:
        made = placeholder(module, device, output)
        model.set_submodule(path, made)
        return made
    owner, _, leaf = path.rpartition(".")
    around = _find(model, owner)
    for tensors in () if around is None else (around._parameters, around._buffers):
        tensor = tensors.pop(leaf, None)
        if tensor is not None:
            setattr(around, leaf, without_memory(tensor.shape, tensor.dtype, device))
    return None


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Module) else None
