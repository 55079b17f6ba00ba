"""Replaces the embeddings, dropouts, norms and heads that belong to other pipeline stages by placeholders."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from oslo_models.pipeline.placeholders import (
    BoundaryDropout,
    OutputKind,
    Placeholder,
    make_placeholder,
    receiving,
    zeros_without_memory,
)
from oslo_models.pipeline.stage import Stage, stack_of
from oslo_models.sharding.local_config import LocalConfig
from oslo_models.sharding.plan import Entries, Norm, Plan, Replicated


def place_boundaries(
    model: nn.Module, plan: Plan, prefix: str, head: Entries, stage: Stage, device: torch.device
) -> None:
    """Replace the embeddings, dropouts, norms and heads of other stages by placeholders.

    Sets the `Stack.receiver` of the stacks of ``stage``.

    Args:
        prefix: path prefix of the base model in ``model``.
        head: entries of the task head.
        device: device of the stage.
    """
    for key, entry in plan.embed.items():
        stack = stack_of(key, prefix, stage.stacks, 0)
        if stage.index == stack.first:
            continue
        output = _output(entry, _find(model, prefix + key), embeds_tokens=stack.input_positions is None)
        is_kept = stage.is_last and key in plan.pipeline.kept_on_last_stage
        replacement = receiving(model, prefix + key) if is_kept else _replace(model, prefix + key, device, output)
        is_stacks_own = len(stage.stacks) == 1 or (prefix + key).startswith(f"{stack.name}.")
        if is_stacks_own and replacement is not None and output is OutputKind.ZEROS:
            stack.receiver = replacement  # the last one wins: its output is the input of the blocks
    for key in plan.modules_of_towers() if stage.index else ():
        _replace(model, prefix + key, device, OutputKind.ZEROS)
    for key, value in plan.pipeline.disabled_after_first_stage.items():
        if stage.index != stack_of(key, prefix, stage.stacks, 0).first:
            owner, _, name = (prefix + key).rpartition(".")
            if f".{owner}".endswith(".config"):
                base: Any = model.get_submodule(owner.removesuffix("config").rstrip("."))
                base.config = LocalConfig(base.config, **{name: value})
                continue
            module = model.get_submodule(owner)
            if hasattr(module, name):
                setattr(module, name, value)
            else:
                module.register_forward_pre_hook(partial(_with_argument, name, value), with_kwargs=True)
    for key in plan.pipeline.embedding_dropouts:
        stack = stack_of(key, prefix, stage.stacks, 0)
        dropout = _find(model, prefix + key)
        if dropout is None:
            continue
        assert isinstance(dropout, nn.Dropout)
        boundary = BoundaryDropout(dropout.p, stage.index == stack.first, stage.index == stack.last)
        model.set_submodule(prefix + key, boundary)
    for key, blocks in plan.pipeline.outputs_per_block.items():
        (stack,) = (each for each in stage.stacks if each.blocks == prefix + blocks)
        if (found := _find(model, prefix + key)) is not None:
            found.register_forward_hook(partial(_from_block, stack.blocks_before))
    after_blocks = [prefix + key for key in plan.head if stage.index != stack_of(key, prefix, stage.stacks, -1).last]
    for key in (*after_blocks, *(head if not stage.is_last else ())):
        _replace(model, key, device, OutputKind.INPUT)


def _output(entry: Replicated, module: nn.Module | None, embeds_tokens: bool) -> OutputKind:
    """Return the output kind of the placeholder for a module before the blocks."""
    if isinstance(entry, Norm) or (embeds_tokens and isinstance(module, nn.Linear)):
        return OutputKind.INPUT
    return OutputKind.ADDEND if embeds_tokens and not entry.embeds_tokens else OutputKind.ZEROS


def _from_block(first: int, module: nn.Module, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
    """Forward hook that drops the entries of blocks on earlier stages."""
    return output[first:]


def _with_argument(
    name: str, value: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook that sets a keyword argument."""
    return args, {**kwargs, name: value}


def _replace(model: nn.Module, path: str, device: torch.device, output: OutputKind) -> Placeholder | None:
    """Replace a module, a parameter or a buffer by a placeholder. Do nothing if it does not exist (optional entries).

    Returns:
        The placeholder of a module, or ``None`` for a parameter or a buffer.
    """
    module = _find(model, path)
    if isinstance(module, Placeholder):  # inside a replaced module
        return None
    if module is not None:
        replacement = make_placeholder(module, device, output)
        model.set_submodule(path, replacement)
        return replacement
    owner, _, leaf = path.rpartition(".")
    parent = _find(model, owner)
    for tensors in () if parent is None else (parent._parameters, parent._buffers):
        tensor = tensors.pop(leaf, None)
        if tensor is not None:
            setattr(parent, leaf, zeros_without_memory(tensor.shape, tensor.dtype, device))
    return None


def _find(model: nn.Module, path: str) -> nn.Module | None:
    try:
        found = model.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, nn.Module) else None
