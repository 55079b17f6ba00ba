"""Chooses the parallel class of a model that `tensor_parallel` is given: of the zoo, or with a derived plan."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from oslo_models import registry
from oslo_models.compat.oslo2 import zoo_class
from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.derived.derivation import derive_plan
from oslo_models.modeling.derived.deriving import CannotProbeError, derive_for_model
from oslo_models.modeling.derived.module import derived_class
from oslo_models.modeling.full_model import is_full


def class_for(model: Any, plan: Any, inputs: Any) -> tuple[Any, bool]:
    """The parallel class for a model, and whether its plan could be tried.

    Args:
        model: a module of any class.
        plan: a plan of the user, ``"derive"`` or ``None``: that of the zoo, or a derived one where the zoo has none.
        inputs: arguments of a call, with which a derived plan is tried.

    Raises:
        ValueError: no plan could be derived, or the model is not a full one.
        RuntimeError: the model is already sharded.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got a {type(model).__name__}")
    if not is_full(model) or hasattr(type(model), "tensor_parallel_config"):
        raise RuntimeError(f"this {type(model).__name__} is already sharded: model.deparallelize() makes it full again")
    is_transformers = isinstance(model, PreTrainedModel) or hasattr(model, "peft_config")  # refused there
    if hasattr(model, "peft_config") or (is_transformers and (plan not in (None, "derive") or _has_plan(type(model)))):
        return zoo_class(model, may_be_empty=True, plan=None if plan == "derive" else plan), True
    if plan not in (None, "derive"):
        raise ValueError(f"plan= is for models of transformers' kind; that of a {type(model).__name__} is derived")
    try:
        derived, is_tried = derive_for_model(model, inputs), True
    except CannotProbeError:
        if inputs is not None or is_transformers:
            raise
        derived, is_tried = derive_plan(model), False
    if is_transformers:
        return zoo_class(model, may_be_empty=True, plan=derived), is_tried
    return derived_class(type(model), derived), is_tried


def _has_plan(cls: type[Any]) -> bool:
    """Whether the zoo has a plan for exactly this class."""
    if issubclass(cls, ParallelModel):
        return True
    try:
        found: Any = registry.find(cls.__name__)
    except AttributeError:
        return False
    return cls in found.__mro__


def default_plan(model: Any) -> str | None:
    """``"derive"`` for a model that the zoo has no plan for."""
    return None if isinstance(model, PreTrainedModel) and _has_plan(type(model)) else "derive"


def untried_copy(model: nn.Module) -> nn.Module:
    """The structure of a model on the meta device, to make a random model of at its first call."""
    params = {id(param): nn.Parameter(param.detach().to("meta"), param.requires_grad) for param in model.parameters()}
    return copy.deepcopy(model, params)
