"""Classes with a plan of the user: of the zoo with another plan, or of any other class of transformers' kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedConfig

from oslo_models.sharding.plan import Entries, Plan

PlanLike = Plan | Callable[[Any], Plan] | str
"""A plan, a function from a configuration to one, or ``"derive"``: see `modeling.derived`."""


def class_with_plan(bases: tuple[type[Any], ...], plan: PlanLike) -> Any:
    """A parallel class with another plan.

    Args:
        bases: a class that is parallel already; or `ParallelModel` and one that is not.
        plan: as of `parallel_class`.

    Raises:
        ValueError: the plan is none.
    """
    if not isinstance(plan, Plan) and not callable(plan):
        raise ValueError(f'plan must be a Plan, a function from a configuration to one or "derive", got {plan!r}')
    cls = bases[-1]
    namespace = {
        "plan": classmethod(partial(_plan, plan)),
        "head_entries": classmethod(partial(_head_entries, plan)),
        "made_from": ClassWithPlan(bases, plan),
        "__module__": cls.__module__,
        "__doc__": cls.__doc__,
    }
    return type(cls.__name__, bases, namespace)


@dataclass(frozen=True)
class ClassWithPlan:
    """What a class was made from: it can be sent to other processes, unlike the class.

    Attributes:
        bases, plan: as of `class_with_plan`.
    """

    bases: tuple[type[Any], ...]
    plan: PlanLike

    def from_pretrained_with_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """`ParallelModel.from_pretrained_with_parallel` of the class."""
        return class_with_plan(self.bases, self.plan).from_pretrained_with_parallel(*args, **kwargs)

    def from_config_with_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """`ParallelModel.from_config_with_parallel` of the class."""
        return class_with_plan(self.bases, self.plan).from_config_with_parallel(*args, **kwargs)


def _given(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> tuple[Plan, Entries | None]:
    """The plan with the base model's names, and the entries outside of it; ``None`` if it had these names."""
    found = plan(config) if callable(plan) else plan
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
