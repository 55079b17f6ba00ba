"""Puts placeholders where an embedding, a dropout, a norm or a head of a model belongs to other pipeline stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from oslo_models.pipeline.placeholders import EndsDropout, Placeholder, placeholder, without_memory
from oslo_models.pipeline.stages import Stage, stack_of
from oslo_models.plan import Entries, Norm, Plan, Vocab, Words


def replace_ends(
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
        words = stack.positions is None
        applied = isinstance(entry, Norm) or (words and isinstance(_find(model, prefix + key), nn.Linear))
        made = _replace(model, prefix + key, device, passes=applied)
        own = len(stage.stacks) == 1 or (prefix + key).startswith(f"{stack.name}.")
        if own and made is not None and not applied and (not words or isinstance(entry, (Vocab, Words))):
            stack.received = made
    for key, value in plan.neutral.items():
        if stage.index != stack_of(key, prefix, stage.stacks, 0).first:
            owner, _, name = (prefix + key).rpartition(".")
            module = model.get_submodule(owner)
            if hasattr(module, name):
                setattr(module, name, value)
            else:
                module.register_forward_pre_hook(partial(_with_argument, name, value), with_kwargs=True)
    for key in plan.dropout:
        stack = stack_of(key, prefix, stage.stacks, 0)
        dropout = _find(model, prefix + key)
        if dropout is None:
            continue
        assert isinstance(dropout, nn.Dropout)
        ends = EndsDropout(dropout.p, stage.index == stack.first, stage.index == stack.last)
        model.set_submodule(prefix + key, ends)
    after = [prefix + key for key in plan.head if stage.index != stack_of(key, prefix, stage.stacks, -1).last]
    for key in (*after, *(head if not stage.is_last else ())):
        _replace(model, key, device, passes=True)


def _with_argument(
    name: str, value: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with one of them, which the call names, replaced."""
    return args, {**kwargs, name: value}


def _replace(model: nn.Module, path: str, device: torch.device, passes: bool) -> Placeholder | None:
    """Let a module, or a parameter, be one of another stage; what is optional may be missing.

    Returns:
        What takes the place of a module.
    """
    module = _find(model, path)
    if module is not None:
        made = placeholder(module, device, passes)
        model.set_submodule(path, made)
        return made
    owner, _, leaf = path.rpartition(".")
    around = _find(model, owner)
    param = None if around is None else around._parameters.pop(leaf, None)
    if param is not None:
        setattr(around, leaf, without_memory(param.shape, param.dtype, device))
    return None


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Module) else None
