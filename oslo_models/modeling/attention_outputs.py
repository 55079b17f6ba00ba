"""Gathers attention weights, since a tensor-parallel rank computes its local heads only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from oslo_models.distributed.autograd_collectives import gather_from
from oslo_models.distributed.mesh import Axis
from oslo_models.layers.divided_tower import DividedTowerModule
from oslo_models.pipeline.sharded_model import ShardedModel


class AttentionOutputs:
    """Gathers the attention weights that a model returns, or an encoder or decoder inside it that is called directly.

    Attributes:
        tp: the axis over which heads are sharded.
        groups: the model's `attention_groups`.
        replicated: the model's `replicated_attentions`.
        joined: the model's `joined_attentions`.
        dims: the model's `attention_dims`.
        depth: the number of nested calls. The outermost call gathers the outputs.
    """

    def __init__(self, model: ShardedModel, tp: Axis) -> None:
        self.tp, self.depth = tp, 0
        self.groups = model.attention_groups(model.config)
        self.replicated = {*model.replicated_attentions(model.config)}
        self.joined, self.dims = model.joined_attentions(model.config), model.attention_dims(model.config)
        modules = dict(model.named_modules())
        # the towers whose images the ranks divide have all heads
        whole = {inner for each in modules.values() if isinstance(each, DividedTowerModule) for inner in each.modules()}
        for path, module in modules.items():
            if isinstance(module, PreTrainedModel) and module is not model and module not in whole:
                side = next((part for part in path.split(".") if part in ("encoder", "decoder")), None)
                module.register_forward_pre_hook(partial(_enter, self))
                module.register_forward_hook(partial(_leave, self, side), with_kwargs=True, always_call=True)

    @contextmanager
    def within_model(self) -> Iterator[None]:
        """Let encoders and decoders return local heads only within the block."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def full(self, name: str, value: Any, given: Any, side: str | None = None) -> Any:
        """Return an output with all heads.

        Args:
            name: the output's name.
            value: the attention weights of each block.
            given: the arguments of the call. Attention weights among them have all heads already.
            side: the stack that returns the output: ``"encoder"``, ``"decoder"``, or ``None`` for the model.
        """
        if isinstance(value, ModelOutput):  # the output of one of several stacks
            return with_values(value, {inner: self.full(inner, each, given) for inner, each in value.items()})
        if not name.endswith("attentions") or {name, f"{side}_{name}"} & self.replicated or not value:
            return value
        passed = {id(leaf) for leaf in tree_leaves(given)}
        if any(id(leaf) in passed for leaf in tree_leaves(value) if leaf is not None):
            return value
        joined, dim = (known.get(f"{side}_{name}", known.get(name, 0)) for known in (self.joined, self.dims))
        gather = partial(_all_heads, self.tp, self.groups, joined, dim)
        return tree_map_only(Tensor, gather, tuple(value))


def with_values(output: ModelOutput, values: Mapping[str, Any]) -> ModelOutput:
    """Return an output of the same class with these values. Some are no fields of the class."""
    names = {each.name for each in fields(output)} if is_dataclass(output) else {*values}
    made = type(output)(**{name: value for name, value in values.items() if name in names})
    for name in values.keys() - names:
        made[name] = values[name]
    return made


def _enter(outputs: AttentionOutputs, *_: Any) -> None:
    """Forward pre-hook of an encoder or decoder."""
    if not torch.compiler.is_compiling():
        outputs.depth += 1


def _leave(
    outputs: AttentionOutputs, side: str | None, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any
) -> Any:
    """Forward hook of an encoder or decoder.

    Raises:
        ValueError: it returns a tuple, which does not tell which outputs are attention weights.
    """
    if torch.compiler.is_compiling():
        return None
    outputs.depth -= 1
    if outputs.depth:
        return None
    if isinstance(output, ModelOutput):
        for name, value in output.items():
            output[name] = outputs.full(name, value, (args, kwargs), side)
        return output
    wanted = kwargs.get("output_attentions")
    if isinstance(output, tuple) and (module.config.output_attentions if wanted is None else wanted):
        raise ValueError(
            f"output_attentions=True of a {type(module).__name__} inside of a tensor-parallel model needs "
            "return_dict=True: a tuple does not show which outputs are attention weights"
        )
    return None


def _all_heads(tp: Axis, groups: int, joined: int, dim: int, weights: Tensor) -> Tensor:
    """Gather attention weights of all heads. Ranks may have different numbers of heads in each of the groups.

    Args:
        joined: the number of all heads in weights of three dimensions, ``[rows * heads, queries, keys]``.
        dim: the dimension of the heads; 0 for the third one from the end.
    """
    if joined and weights.dim() == 3:
        return _all_joined_heads(tp, joined, weights)
    if weights.dim() < 4:
        return weights  # transformers records the output of Qwen's attention over patches in place of its weights
    dim = dim or weights.dim() - 3
    grouped = weights.unflatten(dim, (groups, -1))
    return gather_from(tp, grouped, dim + 1, _sizes(tp, grouped, dim + 1)).flatten(dim, dim + 1)


def _all_joined_heads(tp: Axis, heads: int, weights: Tensor) -> Tensor:
    """Gather attention weights ``[rows * local heads, ...]`` of all heads."""
    sizes = _sizes(tp, weights, 0)
    rows = sum(sizes) // heads
    return gather_from(tp, weights.unflatten(0, (rows, -1)), 1, [size // rows for size in sizes]).flatten(0, 1)


def _sizes(tp: Axis, x: Tensor, dim: int) -> list[int]:
    """Return the size of a dimension on every rank."""
    sizes: list[int] = gather_from(tp, torch.tensor([x.shape[dim]], device=x.device), 0, [1] * tp.size).tolist()
    return sizes
