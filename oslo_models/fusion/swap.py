"""What `model.fuse()` does: modules of one model are swapped for faster ones, and a report says which and why.

A swap gives a module another class, in place: parameters, hooks and names stay, and `undo` gives the old one back.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

import torch
from torch import nn

from oslo_models.fusion import apex
from oslo_models.fusion.lazy_logits import LazyHead

BACKENDS = ("auto", "triton", "apex", "torch")


@dataclass(frozen=True)
class FusionCandidate:
    """A module that fusion has an opinion on.

    Attributes:
        module: its name in the model.
        classes: the classes by which it can be selected: its own and those of the modules around it.
        operation: what it computes.
        cls: the class that it gets; ``None`` leaves it as it is.
        reason: what the swap does, or why there is none.
        attributes: what it gets beside the class.
        timed: whether the product of ``cls`` has to be faster than torch's, which `fusion_timing` measures.
        otherwise: the class that it gets if that product isn't.
    """

    module: str
    classes: tuple[type, ...]
    operation: str
    cls: type | None
    reason: str
    attributes: dict[str, Any] = field(default_factory=dict)
    timed: bool = False
    otherwise: type | None = None

    def is_selected(self, selected: set[type] | None) -> bool:
        """Whether one of the selected classes holds the module; ``None`` selects all."""
        return selected is None or bool(selected.intersection(self.classes))


@dataclass(frozen=True)
class ReportRow:
    """A line of a report: modules that were treated alike."""

    inside: str
    operation: str
    modules: int
    fused: bool
    reason: str


class FusionReport(tuple[ReportRow, ...]):
    """What was swapped or skipped, and why: rows, printed as a table."""

    def __str__(self) -> str:
        lines = [("inside", "operation", "modules", "fused", "what and why")]
        lines += [(r.inside, r.operation, str(r.modules), "yes" if r.fused else "no", r.reason) for r in self]
        widths = [max(len(line[i]) for line in lines) for i in range(4)]
        return "\n".join("  ".join([*map(str.ljust, line, widths), line[4]]).rstrip() for line in lines)


class Fusion:
    """The fusion of one model: what was found in it, and how to undo what was done."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.fusion_candidates: list[FusionCandidate] = []
        self._swapped: dict[str, tuple[nn.Module, type, tuple[str, ...]]] = {}

    def apply(self, model: nn.Module, fusion_candidates: Iterable[FusionCandidate], selected: set[type] | None) -> None:
        """Swap the modules of ``fusion_candidates`` that one of the selected classes holds; ``None`` selects all."""
        self.fusion_candidates = list(fusion_candidates)
        for site in self.fusion_candidates:
            if site.cls is None or site.module in self._swapped:
                continue
            if site.is_selected(selected):
                module = model.get_submodule(site.module)
                new = [name for name in site.attributes if name not in module.__dict__]
                self._swapped[site.module] = (module, type(module), tuple(new))
                module.__dict__.update({name: site.attributes[name] for name in new})
                module.__class__ = site.cls

    def undo(self) -> None:
        """Give every module its class back."""
        for module, cls, attributes in self._swapped.values():
            module.__class__ = cls
            for name in attributes:
                del module.__dict__[name]
        self._swapped.clear()

    def heads(self) -> list[LazyHead]:
        """The heads that may wait with their logits."""
        return [module for module, *_ in self._swapped.values() if isinstance(module, LazyHead)]

    def report(self) -> FusionReport:
        """One row for all sites that were treated alike."""
        counted: dict[tuple[str, str, bool, str], int] = {}
        for site in self.fusion_candidates:
            fused = site.cls is not None and site.module in self._swapped
            reason = site.reason if fused or site.cls is None else "not selected"
            key = (site.classes[0].__name__, site.operation, fused, reason)
            counted[key] = counted.get(key, 0) + 1
        return FusionReport(ReportRow(i, o, count, fused, reason) for (i, o, fused, reason), count in counted.items())


# Backends -------------------------------------------------------------------------------------------------------------


def choose_backend(backend: str, device: torch.device) -> str:
    """The backend that ``"auto"`` means, or the one asked for.

    Raises:
        ValueError: there is no such backend, or it cannot be used here; the message says why.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is none of {', '.join(map(repr, BACKENDS))}")
    missing = {"triton": _why_no_triton(device), "apex": _why_no_apex(device)}
    if backend == "auto":
        return "torch" if missing["triton"] else "triton"
    if missing.get(backend):
        raise ValueError(f"backend={backend!r} cannot be used: {missing[backend]}; backend='auto' takes what can")
    return backend


def _why_no_triton(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"Triton compiles for GPUs, and the model is on {device}"
    return None if importlib.util.find_spec("triton") else "the package triton is not installed"


def _why_no_apex(device: torch.device) -> str | None:
    """Looked for without an import: PyPI's apex is a toolkit for web pages, and importing it pulls in what it needs."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "NVIDIA's apex is not installed (it is not on PyPI: build it from https://github.com/NVIDIA/apex)"
    if PathFinder.find_spec("transformer", list(spec.submodule_search_locations or ())) is None:
        return f"the apex at {spec.origin} is another package than NVIDIA's: it has no apex.transformer"
    return apex.why_not() if device.type == "cuda" else f"apex computes on GPUs, and the model is on {device}"
