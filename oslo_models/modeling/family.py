"""What several architectures share: classes made from a table of their heads, and attention that is not divided."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

from oslo_models.modeling.base import ParallelModel
from oslo_models.sharding.plan import Entries, Norm, Plan, Replicated, VocabParallel

DECODER: Mapping[str, Entries] = {
    "Model": {},
    "ForCausalLM": {"lm_head": VocabParallel()},
    "ForSequenceClassification": {"score": Replicated()},
    "ForTokenClassification": {"score": Replicated()},
    "ForQuestionAnswering": {"qa_outputs": Replicated()},
}
"""The heads that transformers gives to the decoders of today."""


class _Head:
    """The ``head`` of a class whose instances have a module of that name."""

    def __init__(self, entries: Entries) -> None:
        self.entries = entries

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.entries if instance is None else instance._modules["head"]


def family(
    parallel: type[ParallelModel], modeling: ModuleType, heads: Mapping[str, Entries], **more: Mapping[str, Any]
) -> dict[str, type]:
    """A zoo class for each class of ``modeling`` that has a head of the table.

    Args:
        parallel: the class with the plan; its name is that of the architecture with ``Parallel`` behind it.
        modeling: transformers' module.
        heads: the entries of each head, by how the names of the classes end; what ``modeling`` lacks is left out.
        **more: other attributes of a class, by how its name ends.

    Returns:
        The classes and their configuration by name, for the namespace of the architecture's file.
    """
    prefix, found = parallel.__name__.removesuffix("Parallel"), {}
    for ending, head in heads.items():
        original = getattr(modeling, prefix + ending, None)
        if original is not None:
            own = _Head(head) if any(name.startswith("head.") for name in head) else head
            attributes = {"head": own, "__module__": parallel.__module__, **more.get(ending, {})}
            found[original.config_class.__name__] = original.config_class
            found[original.__name__] = type(original.__name__, (parallel, original), attributes)
    return found


def replicated_attention(plan: Plan, more: Collection[str] = ()) -> Plan:
    """``plan`` with the attention of its blocks whole on every rank, of which ``more`` names what BERT's lacks."""
    (stack, block), *_ = plan.blocks.items()
    whole = {
        name: Replicated() if "attention." in name and not isinstance(entry, Norm) else entry
        for name, entry in block.items()
    }
    for name in block:
        if name.endswith(".self.query"):
            whole |= {f"{name.removesuffix('query')}{other}": Replicated() for other in more}
    return replace(plan, blocks={stack: whole}, local={})
