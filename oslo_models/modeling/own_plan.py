"""Classes with a plan of the user: of the zoo with another plan, or of any other class of transformers' kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.plan import Entries, Plan

PlanLike = Plan | Callable[[Any], Plan]
"""A plan, or a function from a configuration to one."""


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
    if not isinstance(plan, Plan) and not callable(plan):
        raise ValueError(f"plan must be a Plan or a function from a configuration to one, got {plan!r}")
    bases = (cls,) if issubclass(cls, ParallelModel) else (ParallelModel, cls)
    namespace = {
        "plan": classmethod(partial(_plan, plan)),
        "head_entries": classmethod(partial(_head_entries, plan)),
        "made_from": ClassWithPlan(cls, plan),
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, bases, namespace)


@dataclass(frozen=True)
class ClassWithPlan:
    """What a class was made from: it can be sent to other processes, unlike the class.

    Attributes:
        cls: the class without the plan.
        plan: as of `parallel_class`.
    """

    cls: type[Any]
    plan: PlanLike

    def from_pretrained_with_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """`ParallelModel.from_pretrained_with_parallel` of the class."""
        return parallel_class(self.cls, self.plan).from_pretrained_with_parallel(*args, **kwargs)

    def from_config_with_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """`ParallelModel.from_config_with_parallel` of the class."""
        return parallel_class(self.cls, self.plan).from_config_with_parallel(*args, **kwargs)


def _given(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> tuple[Plan, Entries | None]:
    """The plan with the base model's names, and the entries outside of it; ``None`` if it had these names."""
    found = plan if isinstance(plan, Plan) else plan(config)
    if not isinstance(found, Plan):
        raise ValueError(f"plan={plan!r} returned {found!r:.100} for a {type(config).__name__}, which is no Plan")
    prefix = f"{cls.base_model_prefix}."
    names = [*found.blocks, *found.embed, *found.head]
    if prefix == "." or not any(name.startswith(prefix) for name in names):
        return found, None
    return found.inside(prefix)


def _plan(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> Plan:
    """`ParallelModel.plan`."""
    return _given(plan, cls, config)[0]


def _head_entries(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> Entries:
    """`ParallelModel.head_entries`."""
    entries = _given(plan, cls, config)[1]
    return cls.head_plan if entries is None else entries
