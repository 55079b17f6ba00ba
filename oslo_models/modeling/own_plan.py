"""Makes parallel classes with other plans, from supported architectures or any other transformers class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from transformers import PreTrainedConfig

from oslo_models.layers.full_weights import as_model_code
from oslo_models.modeling.derived.derivation import DerivedPlan
from oslo_models.modeling.derived.deriving import DerivedFromConfig
from oslo_models.sharding.plan import Entries, Plan

PlanLike = Plan | Callable[[Any], Plan] | str
"""A plan, a function from a configuration to a plan, or ``"derive"`` (see `modeling.derived`)."""


def class_with_plan(bases: tuple[type[Any], ...], plan: PlanLike) -> Any:
    """Return a parallel class with another plan.

    Args:
        bases: a parallel class, or `ParallelModel` and a class that is not parallel.
        plan: see `parallel_class`.

    Raises:
        ValueError: ``plan`` is not a plan.
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
    made: Any = type(cls.__name__, bases, namespace)
    if isinstance(plan, (DerivedPlan, DerivedFromConfig)):
        made.forward = as_model_code(made.forward)
    return made


@cache
def class_with_divided_images(cls: type[Any]) -> Any:
    """Return a parallel class with whole towers of images on every rank (`Plan.with_divided_images`)."""

    def plan(_: type[Any], config: PreTrainedConfig) -> Plan:
        whole: Plan = cls.plan(config)
        return whole.with_divided_images()

    return type(cls.__name__, (cls,), {"plan": classmethod(plan), "__module__": cls.__module__, "__doc__": cls.__doc__})


@dataclass(frozen=True)
class ClassWithPlan:
    """The arguments of `class_with_plan`, which, unlike the class, can be pickled for other processes.

    Attributes:
        bases, plan: see `class_with_plan`.
    """

    bases: tuple[type[Any], ...]
    plan: PlanLike

    def from_pretrained_with_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """Call `ParallelModel.from_pretrained_with_parallel` of the class."""
        return class_with_plan(self.bases, self.plan).from_pretrained_with_parallel(*args, **kwargs)

    def from_config_with_parallel(self, *args: Any, **kwargs: Any) -> Any:
        """Call `ParallelModel.from_config_with_parallel` of the class."""
        return class_with_plan(self.bases, self.plan).from_config_with_parallel(*args, **kwargs)


def _given(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> tuple[Plan, Entries | None]:
    """Return the plan with names relative to the base model, and its entries outside of the base model.

    The entries are ``None`` if the plan's names were relative to the base model already.
    """
    found = plan(config) if callable(plan) else plan
    if not isinstance(found, Plan):
        raise ValueError(f"plan={plan!r} returned {found!r:.100} for a {type(config).__name__}, which is not a Plan")
    prefix = f"{cls.base_model_prefix}."
    names = [*found.blocks, *found.embed, *found.head]
    if prefix == "." or not any(name.startswith(prefix) for name in names):
        return found, None
    return found.inside(prefix)


def _plan(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> Plan:
    """Implement `ParallelModel.plan`."""
    return _given(plan, cls, config)[0]


def _head_entries(plan: PlanLike, cls: type[Any], config: PreTrainedConfig) -> Entries:
    """Implement `ParallelModel.head_entries`."""
    entries = _given(plan, cls, config)[1]
    return cls.head_plan if entries is None else entries
