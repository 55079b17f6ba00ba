"""`parallel_class`: the parallel class for a class of transformers' kind, with a plan of the user."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.modeling.derived.deriving import DerivedFromConfig
from oslo_models.modeling.own_plan import PlanLike, class_with_plan


def parallel_class(cls: type[Any], plan: PlanLike) -> Any:
    """The parallel class for a class of models, with a plan for it.

    Args:
        cls: a subclass of transformers' ``PreTrainedModel``, of the zoo or any other.
        plan: names the modules as ``cls`` does, or as the base model inside it does; in the latter case the entries of
            the head are those of the ``head_plan`` of ``cls``.

    Returns:
        A subclass of ``cls`` and `ParallelModel`, with ``from_pretrained_with_parallel`` and so on.

    Raises:
        ValueError: ``cls`` is not such a class, or the plan is none.
    """
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise ValueError(f"a parallel class is made of a subclass of transformers' PreTrainedModel, not of {cls!r}")
    if plan == "derive":
        if issubclass(cls, ParallelModel):
            return cls  # it has a plan
        plan = DerivedFromConfig(cls)
    return class_with_plan((cls,) if issubclass(cls, ParallelModel) else (ParallelModel, cls), plan)
