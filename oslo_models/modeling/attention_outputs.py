"""Gathers attention weights, of which a tensor-parallel rank computes its own heads only."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from oslo_models.distributed.autograd_collectives import gather_from
from oslo_models.distributed.mesh import Axis


class AttentionOutputs:
    """The attention weights that a model, or a stack inside it that is called by itself, returns.

    Attributes:
        tp: the ranks over which heads are sharded.
        replicated: the outputs of the model that have all heads on every rank.
        depth: how many calls are running, of which the outermost gathers what the others return.
    """

    def __init__(self, model: nn.Module, tp: Axis, replicated: Collection[str]) -> None:
        self.tp, self.replicated, self.depth = tp, replicated, 0
        for path, module in model.named_modules():
            if isinstance(module, PreTrainedModel) and module is not model:
                side = next((part for part in path.split(".") if part in ("encoder", "decoder")), None)
                module.register_forward_pre_hook(partial(_enter, self))
                module.register_forward_hook(partial(_leave, self, side), with_kwargs=True, always_call=True)

    @contextmanager
    def within_model(self) -> Iterator[None]:
        """Within the block, stacks return the heads of this rank."""
        self.depth += 1
        try:
            yield
        finally:
            self.depth -= 1

    def full(self, name: str, value: Any, given: Any, side: str | None = None) -> Any:
        """An output with all heads.

        Args:
            name: its name.
            value: the weights of each block.
            given: the arguments of the call: weights that were passed have all heads.
            side: the stack that returns it: ``"encoder"``, ``"decoder"`` or, of the model, ``None``.
        """
        if isinstance(value, ModelOutput):  # the output of one of several stacks
            return type(value)(**{inner: self.full(inner, each, given) for inner, each in value.items()})
        if not name.endswith("attentions") or not value or {name, f"{side}_{name}"} & {*self.replicated}:
            return value
        passed = {id(leaf) for leaf in tree_leaves(given)}
        if any(id(leaf) in passed for leaf in tree_leaves(value) if leaf is not None):
            return value
        return tree_map_only(Tensor, partial(_all_heads, self.tp), tuple(value))


def _enter(outputs: AttentionOutputs, *_: Any) -> None:
    """A hook before the forward of a stack."""
    if not torch.compiler.is_compiling():
        outputs.depth += 1


def _leave(
    outputs: AttentionOutputs, side: str | None, module: Any, args: Any, kwargs: Mapping[str, Any], output: Any
) -> Any:
    """A hook after the forward of a stack.

    Raises:
        ValueError: the stack returns a tuple, which does not tell where the attention weights are.
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
            "return_dict=True: a tuple does not tell which outputs are attention weights"
        )
    return None


def _all_heads(tp: Axis, weights_BHQK: Tensor) -> Tensor:
    """Attention weights of all heads, of which ranks may have different numbers."""
    count = torch.tensor([weights_BHQK.shape[1]], device=weights_BHQK.device)
    return gather_from(tp, weights_BHQK, 1, gather_from(tp, count, 0, [1] * tp.size).tolist())
