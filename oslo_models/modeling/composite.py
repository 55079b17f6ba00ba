"""Plans of models composed of other models of the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.plan import Plan


def plan_of_part(name: str, cls: type[ParallelModel], config: Any, outputs: Mapping[str, str]) -> Plan:
    """The plan of one model inside a composite model, its head included.

    Args:
        name: its attribute in the composite model.
        cls: its zoo class.
        config: its configuration.
        outputs: the names of its attention outputs: its own, and those that the composite model gives them.
    """
    plan = cls.plan(config).under(f"{name}.{_prefix_of(cls)}")  # type: ignore[arg-type]
    # The layers of the caches of a stage are found in the configuration of the composite model only.
    types = getattr(config, "layer_types", None)
    return replace(
        plan,
        head={**plan.head, **{f"{name}.{key}": entry for key, entry in cls.head_plan.items()}},
        replicated_attentions=[
            given for own, given in outputs.items() if own in plan.replicated_attentions or plan.max_ranks() is None
        ],
        single_stage_reason=plan.single_stage_reason
        or ("one of its parts has blocks of several types" if types else ""),
    )


@cache
def _prefix_of(cls: type[ParallelModel]) -> str:
    """The path of the base model in the models of a class, as found in an instance on the meta device."""
    with torch.device("meta"):
        return cls._from_config(cls.config_class())._prefix()
