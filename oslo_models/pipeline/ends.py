"""Puts stand-ins where an embedding, a dropout, a norm or a head of a model belongs to other pipeline stages."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from oslo_models.pipeline.stages import Stage, stack_of
from oslo_models.pipeline.stand_ins import EndsDropout, PassOn, Received, of_another_stage
from oslo_models.plan import Entries, Norm, Plan, Vocab, Words


def replace_ends(model: nn.Module, plan: Plan, prefix: str, head: Entries, stage: Stage) -> None:
    """Put stand-ins where an embedding, a dropout, a norm or a head belongs to other stages."""
    for key, entry in plan.embed.items():
        stack = stack_of(key, prefix, stage.stacks, 0)
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
        if stage.index != stack_of(key, prefix, stage.stacks, 0).first:
            owner, _, name = (prefix + key).rpartition(".")
            module = model.get_submodule(owner)
            if hasattr(module, name):
                setattr(module, name, value)
            else:
                module.register_forward_pre_hook(partial(_with_argument, name, value), with_kwargs=True)
    for key in plan.dropout:
        stack = stack_of(key, prefix, stage.stacks, 0)
        if not _has(model, prefix + key):
            continue
        dropout = model.get_submodule(prefix + key)
        assert isinstance(dropout, nn.Dropout)
        ends = EndsDropout(dropout.p, stage.index == stack.first, stage.index == stack.last)
        model.set_submodule(prefix + key, ends)
    after = [prefix + key for key in plan.head if stage.index != stack_of(key, prefix, stage.stacks, -1).last]
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
    root.__class__ = of_another_stage(type(root))  # type: ignore[arg-type]


def _has(model: nn.Module, path: str) -> bool:
    try:
        return isinstance(model.get_submodule(path), nn.Module)
    except AttributeError:
        return False
