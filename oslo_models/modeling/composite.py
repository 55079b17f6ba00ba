"""Plans of models that are composed of other supported models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from inspect import getattr_static
from typing import Any

import torch

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.plan import Entries, Plan, Replicated, VocabParallel


def replicated_in_part(cls: type[ParallelModel], config: Any, outputs: Mapping[str, str]) -> list[str]:
    """Return the outputs of a composite model with attention weights of all heads on every rank.

    Args:
        cls: the parallel class of the part that computes them.
        config: the part's configuration.
        outputs: maps the part's attention output names to their names in the composite model.
    """
    replicated, is_replicated = cls.replicated_attentions(config), cls.plan(config).max_ranks() is None
    return [given for own, given in outputs.items() if is_replicated or own in replicated]


def plan_of_part(name: str, cls: type[ParallelModel], config: Any) -> Plan:
    """Return the plan of one part of a composite model, including its task head.

    Args:
        name: the part's attribute name in the composite model.
        cls: the part's parallel class.
        config: the part's configuration.
    """
    plan = cls.plan(config).under(f"{name}.{_prefix_of(cls)}")  # type: ignore[arg-type]
    # A stage finds the layers of its caches only in the configuration of the composite model.
    types = getattr(config, "layer_types", None)
    return replace(
        plan,
        head={**plan.head, **{f"{name}.{key}": entry for key, entry in cls.head_plan.items()}},
    ).with_rules(
        single_stage_reason=plan.pipeline.single_stage_reason
        or ("one of its parts has blocks of several types" if types else "")
    )


def plan_of_generator(name: str, cls: type[ParallelModel], config: Any) -> Plan:
    """Return the plan of a part that generates by itself. Every rank holds its vocabulary.

    Args:
        name, cls, config: as for `plan_of_part`.

    Raises:
        ValueError: the part cannot be sharded inside of another model. The message names its class.
    """
    _check_part(cls, config)
    plan = plan_of_part(name, cls, config)
    embed, head = (
        {key: Replicated() if isinstance(entry, VocabParallel) else entry for key, entry in entries.items()}
        for entries in (plan.embed, plan.head)
    )
    return replace(plan, embed=embed, head=head).with_rules(single_stage_reason="a part of it generates by itself")


def plan_with_towers(
    decoder: tuple[str, type[ParallelModel], Any],
    towers: Sequence[tuple[str, type[ParallelModel], Any]],
    projectors: Entries,
) -> Plan:
    """Return the plan of a decoder that reads the outputs of towers.

    Args:
        decoder: its attribute name in the model, its class and its configuration.
        towers: the same of each tower.
        projectors: the modules between towers and decoder, and towers that every rank holds in full.

    Raises:
        ValueError: a part cannot be sharded inside of another model. The message names its class.
    """
    for _, cls, config in (decoder, *towers):
        _check_part(cls, config)
    plans = {
        name: replace(plan, head={**plan.head, **cls.head_entries(config)}).under(f"{name}.")
        for name, cls, config in (decoder, *towers)
        for plan in [cls.plan(config)]
    }
    own = plans.pop(decoder[0])
    first = next(iter(plans or projectors))  # projectors are on the same pipeline stage as towers
    tower = plans.get(first, Plan(embed={}, blocks={}, head={}))
    plans |= {first: replace(tower, head={**tower.head, **projectors})}
    reasons = (plan.single_rank_reason for plan in (own, *plans.values()))
    return replace(own, towers=plans, single_rank_reason=next(filter(None, reasons), ""))


_OF_CLASS = ("_initialize_constructed", "_initialized_whole", "_shard", "attention_groups", "zeros")
"""Attributes of parallel classes that the plan lacks. A model around the part does not read them."""


def _check_part(cls: type[ParallelModel], config: Any) -> None:
    """Raise ``ValueError`` if the plan of a class does not suffice to shard it inside of another model."""
    own = [name for name in _OF_CLASS if getattr_static(cls, name) is not getattr_static(ParallelModel, name)]
    if cls.replicated_attentions(config) or cls.plan(config).max_ranks() is None:
        own.append("attention with all heads on every rank")
    if own:
        raise ValueError(
            f"{cls.__name__} is not supported as a part of a model with towers, since it has {' and '.join(own)}: use "
            "a configuration with another decoder or tower"
        )


@cache
def _prefix_of(cls: type[ParallelModel]) -> str:
    """Return the path of the base model in a class's models, from an instance on the meta device."""
    with torch.device("meta"), torch.random.fork_rng([]):  # Wav2Vec2 draws a parameter on the CPU
        return cls._from_config(cls.config_class())._prefix()
