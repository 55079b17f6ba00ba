"""Replace modules of one model by faster ones, for `model.fuse()`, and report the decisions.

A module is replaced in place by changing its class: parameters, hooks and names stay, and `undo` restores the class.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from typing import Any

import torch
from torch import nn

from oslo_models.fusion import apex
from oslo_models.fusion.lazy_logits import LazyHead
from oslo_models.sharding.model_protocol import TransformersModel

BACKENDS = ("auto", "triton", "apex", "torch")


@dataclass(frozen=True)
class FusionCandidate:
    """A module with a fusion rule, and the decision on it.

    Attributes:
        module: the module's name in the model.
        classes: the classes that select the module: the classes of the module and of the modules around it.
        operation: the name of the operation in the report.
        cls: the new class. ``None`` leaves the module unfused.
        reason: the gain, or the reason for leaving the module unfused.
        attributes: the attributes to set on the module together with the class.
        timed: whether to use ``cls`` only if its product is faster than torch's, as measured by `timing`.
        otherwise: the new class if the product is not faster.
    """

    module: str
    classes: tuple[type, ...]
    operation: str
    cls: type | None
    reason: str
    attributes: dict[str, Any] = field(default_factory=dict)
    timed: bool = False
    otherwise: type | None = None

    def left_out(self, changed: str) -> FusionCandidate:
        """Return a candidate that leaves the module unfused because transformers has changed."""
        reason = f"{changed}, so {self.operation} stays unfused" if self.cls is not None else self.reason
        return replace(self, cls=None, reason=reason, attributes={}, timed=False, otherwise=None)

    def is_selected(self, selected: set[type] | None) -> bool:
        """Return whether the module or a module around it has a selected class. ``None`` selects all modules."""
        return selected is None or bool(selected.intersection(self.classes))


@dataclass(frozen=True)
class FusionReportRow:
    """A line of a report: modules of one class and operation with the same outcome."""

    inside: str
    operation: str
    modules: int
    fused: bool
    reason: str


class FusionReport(tuple[FusionReportRow, ...]):
    """The fused and unfused modules with reasons: rows, printed as a table."""

    def __str__(self) -> str:
        lines = [("inside", "operation", "modules", "fused", "what and why")]
        lines += [(r.inside, r.operation, str(r.modules), "yes" if r.fused else "no", r.reason) for r in self]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join("  ".join([*map(str.ljust, line, widths), line[4]]).rstrip() for line in lines)


class Fusion:
    """The fusion of one model: its candidates, and how to undo the replacements.

    Args:
        weights: the dtype of the narrow weights of linear layers. ``None``: the parameters are used.
        float8: the recipe for training linear layers in float8. ``None``: no float8.
    """

    def __init__(self, backend: str, weights: str | None = None, float8: str | None = None) -> None:
        self.backend, self.weights, self.float8 = backend, weights, float8
        self.fusion_candidates: list[FusionCandidate] = []
        self._swapped: dict[str, tuple[nn.Module, type, tuple[str, ...]]] = {}

    def apply(
        self, model: TransformersModel, fusion_candidates: Iterable[FusionCandidate], selected: set[type] | None
    ) -> None:
        """Replace the candidates' modules inside selected classes. ``None`` selects all."""
        self.fusion_candidates, modules = list(fusion_candidates), dict(model.named_modules())
        for candidate in self.fusion_candidates:
            if candidate.cls is None or candidate.module in self._swapped:
                continue
            if candidate.is_selected(selected):
                module = modules[candidate.module]
                new = [name for name in candidate.attributes if name not in module.__dict__]
                self._swapped[candidate.module] = (module, type(module), tuple(new))
                module.__dict__.update({name: candidate.attributes[name] for name in new})
                module.__class__ = candidate.cls

    def swapped(self) -> frozenset[str]:
        """The names of the modules that were replaced."""
        return frozenset(self._swapped)

    def undo(self, names: Iterable[str] | None = None) -> None:
        """Restore the original class of all modules, or of the modules with these names."""
        for swapped in list(self._swapped if names is None else names):
            module, cls, attributes = self._swapped.pop(swapped)
            module.__class__ = cls
            for name in attributes:
                del module.__dict__[name]

    def heads(self) -> list[LazyHead]:
        """The heads that can return lazy logits."""
        return [module for module, *_ in self._swapped.values() if isinstance(module, LazyHead)]

    def report(self) -> FusionReport:
        """Return the report, with one row for all modules with the same class, operation and outcome."""
        counted: dict[tuple[str, str, bool, str], int] = {}
        for candidate in self.fusion_candidates:
            fused = candidate.cls is not None and candidate.module in self._swapped
            reason = candidate.reason if fused or candidate.cls is None else "not selected"
            key = (candidate.classes[0].__name__, candidate.operation, fused, reason)
            counted[key] = counted.get(key, 0) + 1
        return FusionReport(
            FusionReportRow(i, o, count, fused, reason) for (i, o, fused, reason), count in counted.items()
        )


# Backends -------------------------------------------------------------------------------------------------------------


def choose_backend(backend: str, device: torch.device) -> str:
    """Return the given backend, or for ``"auto"`` the default backend of this device.

    Raises:
        ValueError: there is no such backend, or it cannot be used here. The message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(map(repr, BACKENDS))}")
    missing = {"triton": _why_no_triton(device), "apex": _why_no_apex(device)}
    if backend == "auto":
        return "torch" if missing["triton"] else "triton"
    if missing.get(backend):
        raise ValueError(
            f"backend={backend!r} cannot be used: {missing[backend]}; backend='auto' picks an available one"
        )
    return backend


def _why_no_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"Triton compiles for GPUs, and the model is on {device}"
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def _why_no_apex(device: torch.device) -> str | None:
    """Look for NVIDIA's apex without importing it, since PyPI's apex, a web toolkit, imports many other packages."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "NVIDIA's apex is not installed (it is not on PyPI: build it from https://github.com/NVIDIA/apex)"
    if PathFinder.find_spec("transformer", list(spec.submodule_search_locations or ())) is None:
        return f"the apex at {spec.origin} is another package than NVIDIA's: it has no apex.transformer"
    return (
        apex.unavailable_reason() if device.type == "cuda" else f"apex computes on GPUs, and the model is on {device}"
    )
