"""`parallel_class`: makes a parallel class from a transformers class and a user's plan."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.derived.deriving import DerivedFromConfig
from oslo_models.modeling.own_plan import PlanLike, class_with_plan


def parallel_class(cls: type[Any], plan: PlanLike) -> Any:
    """Return the parallel class of a model class, with a plan.

    Args:
        cls: a subclass of transformers' ``PreTrainedModel``, from this library or any other source.
        plan: the sharding plan, with module names relative to ``cls`` or to its base model. If the names are relative
            to the base model, ``cls.head_plan`` provides the entries of the task head.

    Returns:
        A subclass of ``cls`` and `ParallelModel`, with ``from_pretrained_with_parallel`` and so on.

    Raises:
        ValueError: ``cls`` is not a subclass of ``PreTrainedModel``, or ``plan`` is not a plan.
    """
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(f"a parallel class needs a subclass of transformers' PreTrainedModel, not {cls!r}")
    if plan == "derive":
        if issubclass(cls, ParallelModel):
            return cls  # the class already has a plan
        plan = DerivedFromConfig(cls)
    return class_with_plan((cls,) if issubclass(cls, ParallelModel) else (ParallelModel, cls), plan)
