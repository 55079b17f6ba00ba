"""The modules of a model as the rules of fusing see them, and what a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from oslo_kernels import decode_attention, passes, small_operations
from oslo_models.contracts import broken
from oslo_models.fusion.known_layers import layer_name
from oslo_models.fusion.swap import FusionCandidate
from oslo_models.pipeline.placeholders import Placeholder
from oslo_models.sharding.plan import VocabParallel

ONE_PASS = "one pass in C++"


@dataclass(frozen=True)
class Subject:
    """A module of a model, as the rules see it.

    Attributes:
        name: the module's name in the model.
        layer: its class, as `known_layers` names it.
        classes: the classes of transformers' layers around it, its own first and that of the model last.
        is_lm_head: whether it maps hidden states to logits over the vocabulary.
        parent: the class of the module that holds it, as `known_layers` names it.
    """

    model: Any
    backend: str
    name: str
    module: Any
    layer: str
    classes: tuple[type, ...]
    is_lm_head: bool
    parent: str

    @property
    def cls(self) -> Any:
        """The module's class."""
        return type(self.module)

    @property
    def on_cpu(self) -> bool:
        """Whether small operations of the model are fused on a CPU."""
        is_there = all(each.why_not() is None for each in (decode_attention, small_operations, passes))
        return self.backend == "torch" and self.model.device.type == "cpu" and is_there

    def candidate(self, operation: str, cls: type | None, reason: str, **options: Any) -> FusionCandidate:
        """This module as a `FusionCandidate`."""
        return FusionCandidate(self.name, self.classes, operation, cls, reason, **options)

    def on_gpu(
        self, operation: str, *, reason: str = "", attributes: Any = None, **by_backend: type
    ) -> FusionCandidate:
        """This module with the fused class of its backend mixed in; unfused where the backend has none."""
        if self.backend in by_backend:
            cls = mixed(by_backend[self.backend], self.cls)
            return self.candidate(operation, cls, reason or one_pass(self.backend), attributes=attributes or {})
        return self.candidate(
            operation, None, "apex has no kernel for it" if self.backend == "apex" else "gains on a GPU, in Triton"
        )


@dataclass(frozen=True)
class FusionRule:
    """How one kind of module is fused.

    Attributes:
        match: whether a module is of this kind.
        build: makes its candidates: one, except for a head whose loss cannot be fused but whose product can.
        relies_on: functions of `oslo_models.contracts` that it copies. The module stays unfused if one has changed.
    """

    match: Callable[[Subject], bool]
    build: Callable[[Subject], Iterator[FusionCandidate]]
    relies_on: tuple[str, ...] = ()

    def changed(self) -> str | None:
        """What an installed package changed of what the rule relies on."""
        return next((found for found in map(broken, self.relies_on) if found is not None), None)


def subjects(model: Any, backend: str) -> Iterator[Subject]:
    """The modules of this rank's stage; placeholders, which stand for modules of other stages, are left out."""
    entries = {**model.plan(model.config).under(model._prefix()).head, **model.head_entries(model.config)}
    lm_heads = {name for name, entry in entries.items() if isinstance(entry, VocabParallel)}
    layers = {name: layer_name(module) for name, module in model.named_modules()}
    elsewhere: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(elsewhere):
            continue
        if isinstance(module, Placeholder):
            elsewhere += (f"{name}.",)
            continue
        is_lm_head = name in lm_heads and isinstance(module, nn.Linear)
        parent = layers.get(name.rpartition(".")[0], "")
        yield Subject(model, backend, name, module, layers[name], _classes_around(model, name), is_lm_head, parent)


def _classes_around(model: nn.Module, name: str) -> tuple[type, ...]:
    """The classes of transformers' layers around a module, its own first if it is one, and that of the model last."""
    found: list[type] = []
    module = model
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        if type(module).__module__.startswith("transformers.models."):
            found.insert(0, type(module))
    return (*found, type(model))


@cache
def mixed(fused: Any, cls: Any) -> type:
    """``cls`` with the methods of ``fused``."""
    return type(f"Fused{cls.__name__}", (fused, cls), {"__module__": __name__})


def one_pass(backend: str) -> str:
    return "one pass in apex" if backend == "apex" else "one pass in Triton"
