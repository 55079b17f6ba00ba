"""Chooses the parallel class for a model passed to `tensor_parallel`: from the zoo, or with a derived plan."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from oslo_models.compat.any_module import shard_in_place
from oslo_models.compat.oslo2 import broadcast_weights, has_plan, zoo_class
from oslo_models.compat.tensor_parallel.config import Config
from oslo_models.compat.tensor_parallel.rules import Rules, ruled_class
from oslo_models.distributed.mesh import ParallelMesh, world_axis
from oslo_models.distributed.object_exchange import agree, require_equal
from oslo_models.modeling.derived.derivation import derive_plan
from oslo_models.modeling.derived.deriving import derive_for_model, verify
from oslo_models.modeling.derived.module import derived_class
from oslo_models.modeling.derived.probe import CannotProbeError
from oslo_models.modeling.full_model import is_full
from oslo_models.modeling.original_class import original_class

_TRIED_PARAMETERS = 50_000_000
"""Without inputs, rules of larger models are not verified."""


def class_for(model: nn.Module, plan: Any, inputs: Any, n: int) -> tuple[Any, bool]:
    """Return the parallel class for a model, and whether its plan needs no check at the first call.

    Args:
        model: a module of any class.
        plan: a user's plan or rules, ``"derive"``, or ``None`` for the zoo's plan, or a derived plan for a class
            outside the zoo.
        inputs: arguments of a call that verifies a derived plan or rules.
        n: the number of ranks.

    Raises:
        ValueError: no plan could be derived, or the model is not a full one.
        RuntimeError: the model is already sharded.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    if not is_full(model) or hasattr(type(model), "tensor_parallel_config"):
        raise RuntimeError(f"this {type(model).__name__} is already sharded: model.deparallelize() makes it full again")
    if isinstance(plan, Config):
        return _ruled(model, plan, inputs, n)
    is_transformers = isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")  # refused there
    if hasattr(model, "peft_config") or (is_transformers and (plan not in (None, "derive") or has_plan(type(model)))):
        return zoo_class(model, may_be_empty=True, plan=None if plan == "derive" else plan), True
    if plan not in (None, "derive"):
        raise ValueError(f"plan= is for transformers models; the plan of a {type(model).__name__} is derived")
    try:
        derived, is_tried = derive_for_model(model, inputs), True
    except CannotProbeError:
        if inputs is not None or is_transformers:
            raise
        derived, is_tried = derive_plan(model), False
    if is_transformers:
        return zoo_class(model, may_be_empty=True, plan=derived), is_tried
    return derived_class(type(model), derived), is_tried


def _ruled(model: nn.Module, rules: Config, inputs: Any, n: int) -> tuple[Any, bool]:
    """Implement `class_for` for a user's rules."""
    cls: Any = original_class(type(model)) if isinstance(model, PreTrainedModel) else type(model)
    if inputs is not None:
        named = isinstance(inputs, Mapping)
        args = () if named else tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        verify(model, Rules(rules), args, dict(inputs) if named else {}, n)
    is_large = sum(param.numel() for param in model.parameters()) > _TRIED_PARAMETERS
    return ruled_class(cls, rules), inputs is not None or is_large


def check_rules(rules: Any, plan: Any, sharded: Any) -> None:
    """Raise ``ValueError`` if ``tensor_parallel_config`` is not a `Config`, or conflicts with other arguments."""
    if not isinstance(rules, Config):
        raise ValueError(
            f"tensor_parallel_config must be a Config(state_rules, input_rules, output_rules, attr_rules), got "
            f"{rules!r:.100}"
        )
    if plan is not None:
        raise ValueError("tensor_parallel_config and plan both say how the model is sharded: pass one of them")
    if sharded:
        raise ValueError(
            "sharded and sharded_param_names do not go with tensor_parallel_config: shard these parameters by a state "
            "rule, and gather the outputs by an output rule"
        )


@torch.no_grad()
def initialize_ruled(model: nn.Module, rules: Config, inputs: Any) -> Any:
    """Shard a module of any class for this rank by rules, in place. A collective.

    Raises:
        ValueError: a rule does not fit; on every rank, with the model unchanged.
        RuntimeError: the model is already sharded.
    """
    world = world_axis()
    with agree(world, "checking tensor_parallel_config"):
        cls, _ = class_for(model, rules, inputs, world.size)
        names = [name for name, _ in model.named_modules()]
        tensors = model.state_dict()
        rules.check_names([*dict(model.named_parameters()), *dict(model.named_buffers())], names)
        layouts = {name: layout for name, (layout, _) in rules.layouts(tensors, world.size).items()}
    require_equal(world, {name: str(layout) for name, layout in layouts.items()}, "arguments of tensor_parallel")
    return shard_in_place(model, cls, ParallelMesh(world.size, 1), broadcast_weights)


def default_plan(model: nn.Module) -> str | None:
    """Return ``"derive"`` for a model without a plan in the zoo, else ``None``."""
    return None if isinstance(model, PreTrainedModel) and has_plan(type(model)) else "derive"


def untried_copy(model: nn.Module) -> nn.Module:
    """Copy a model to the meta device. The first call makes a random model from the copy."""
    params = {id(param): nn.Parameter(param.detach().to("meta"), param.requires_grad) for param in model.parameters()}
    return copy.deepcopy(model, params)
