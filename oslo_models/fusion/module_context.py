"""The interface of the fusion rules: `ModuleContext` for a module of a model, and `FusionRule` for a rule."""

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
from oslo_models.layers.entries import VocabParallel
from oslo_models.pipeline.placeholders import Placeholder
from oslo_models.pipeline.sharded_model import ShardedModel

ONE_PASS = "one pass in C++"


@dataclass(frozen=True)
class ModuleContext:
    """A module of a model with its context, the argument of the rules.

    Attributes:
        name: the module's name in the model.
        layer: the module's class, as `known_layers` names it.
        classes: the classes of transformers' layers from the module itself outward to the model.
        is_lm_head: whether the module maps hidden states to logits over the vocabulary.
        parent: the class of the parent module, as `known_layers` names it.
    """

    model: ShardedModel
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
        """Return whether small operations of the model are fused on a CPU."""
        is_there = all(each.unavailable_reason() is None for each in (decode_attention, small_operations, passes))
        return self.backend == "torch" and self.model.device.type == "cpu" and is_there

    def candidate(self, operation: str, cls: type | None, reason: str, **options: Any) -> FusionCandidate:
        """Return a `FusionCandidate` for this module."""
        return FusionCandidate(self.name, self.classes, operation, cls, reason, **options)

    def on_gpu(
        self, operation: str, *, reason: str = "", attributes: Any = None, **by_backend: type
    ) -> FusionCandidate:
        """Return a candidate with the fused class of the backend mixed in, or unfused if the backend has none."""
        if self.backend in by_backend:
            cls = mixed(by_backend[self.backend], self.cls)
            return self.candidate(operation, cls, reason or one_pass(self.backend), attributes=attributes or {})
        return self.candidate(
            operation, None, "apex has no kernel for it" if self.backend == "apex" else "gains on a GPU, in Triton"
        )


@dataclass(frozen=True)
class FusionRule:
    """A rule that fuses one kind of module.

    Attributes:
        match: whether a module is of this kind.
        build: makes the module's candidates. There is one, except for a head with a fusible product but no fusible
            loss.
        relies_on: functions of `oslo_models.contracts` that the rule copies. The module stays unfused if one has
            changed.
    """

    match: Callable[[ModuleContext], bool]
    build: Callable[[ModuleContext], Iterator[FusionCandidate]]
    relies_on: tuple[str, ...] = ()

    def changed(self) -> str | None:
        """Return which function of `relies_on` an installed package has changed, or ``None``."""
        return next((found for found in map(broken, self.relies_on) if found is not None), None)


def module_contexts(model: ShardedModel, backend: str) -> Iterator[ModuleContext]:
    """Yield the modules of this rank's pipeline stage, without placeholders for modules of other stages."""
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
        yield ModuleContext(
            model, backend, name, module, layers[name], _classes_around(model, name), is_lm_head, parent
        )


def _classes_around(model: ShardedModel, name: str) -> tuple[type, ...]:
    """Return the classes of transformers' layers from the module outward, with the class of the model last."""
    found: list[type] = []
    module: Any = model
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        if type(module).__module__.startswith("transformers.models."):
            found.insert(0, type(module))
    return (*found, type(model))


@cache
def mixed(fused: Any, cls: Any) -> type:
    """Return a subclass of ``cls`` with the methods of ``fused``."""
    return type(f"Fused{cls.__name__}", (fused, cls), {"__module__": __name__})


def one_pass(backend: str) -> str:
    return "one pass in apex" if backend == "apex" else "one pass in Triton"
