"""What models that are made of others need: the plan of a part, which is made like a class of the zoo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.plan import Plan


def part(name: str, cls: type[ParallelModel], config: Any, outputs: Mapping[str, str]) -> Plan:
    """The plan of a model's part, its head included.

    Args:
        name: what the part is called in the model.
        cls: the zoo class that is made like it.
        config: its configuration.
        outputs: how the model's output calls the attention weights that the part gives, by how its own calls them.
    """
    plan = cls.plan(config).under(f"{name}.{_prefix_of(cls)}")  # type: ignore[arg-type]
    types = getattr(config, "layer_types", None)  # of which a stage keeps its own, in the configuration of a model
    return replace(
        plan,
        head={**plan.head, **{f"{name}.{key}": entry for key, entry in cls.head_plan.items()}},
        replicated_attentions=[
            given for own, given in outputs.items() if own in plan.replicated_attentions or plan.limit() is None
        ],
        single_stage_reason=plan.single_stage_reason
        or ("one of its parts has blocks of several types" if types else ""),
    )


@cache
def _prefix_of(cls: type[ParallelModel]) -> str:
    """Where the base model sits in the models of a class; it takes one to see."""
    with torch.device("meta"):
        return cls._from_config(cls.config_class())._prefix()
