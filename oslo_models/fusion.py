"""What `model.fuse()` does: modules of one model are swapped for faster ones, and a report says which and why.

A swap gives a module another class, in place: parameters, hooks and names stay, and `undo` gives the old one back.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation, GELUTanh, NewGELUActivation, SiLUActivation
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from oslo_kernels.norm import add_norm
from oslo_kernels.swiglu import swiglu
from oslo_models.layers.deferred import DeferredHead, DeferredVocabParallelHead
from oslo_models.layers.vocab import VocabParallelHead
from oslo_models.layout import Layout, Units
from oslo_models.mesh import Axis
from oslo_models.plan import Vocab

BACKENDS = ("auto", "triton", "apex", "torch")
_NO_AXIS = Axis("tp", 0, (0,), None)


@dataclass(frozen=True)
class Site:
    """A module that fusion has an opinion on.

    Attributes:
        module: its name in the model.
        classes: the classes by which it can be selected: its own and those of the modules around it.
        operation: what it computes.
        cls: the class that it gets; ``None`` leaves it as it is.
        reason: what the swap does, or why there is none.
    """

    module: str
    classes: tuple[type, ...]
    operation: str
    cls: type | None
    reason: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A line of a report: modules that were treated alike."""

    inside: str
    operation: str
    modules: int
    fused: bool
    reason: str


class FusionReport(tuple[Row, ...]):
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
        self.sites: list[Site] = []
        self._swapped: dict[str, tuple[nn.Module, type, tuple[str, ...]]] = {}

    def apply(self, model: nn.Module, sites: Iterable[Site], selected: set[type] | None) -> None:
        """Swap the modules of ``sites`` that one of the selected classes holds; ``None`` selects all."""
        self.sites = list(sites)
        for site in self.sites:
            if site.cls is None or site.module in self._swapped:
                continue
            if selected is None or selected.intersection(site.classes):
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

    def heads(self) -> list[DeferredHead]:
        """The heads that may wait with their logits."""
        return [module for module, *_ in self._swapped.values() if isinstance(module, DeferredHead)]

    def report(self) -> FusionReport:
        """One row for all sites that were treated alike."""
        counted: dict[tuple[str, str, bool, str], int] = {}
        for site in self.sites:
            fused = site.module in self._swapped
            reason = site.reason if fused or site.cls is None else "not selected"
            key = (site.classes[0].__name__, site.operation, fused, reason)
            counted[key] = counted.get(key, 0) + 1
        return FusionReport(Row(i, o, count, fused, reason) for (i, o, fused, reason), count in counted.items())


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
    return None if device.type == "cuda" else f"apex computes on GPUs, and the model is on {device}"


# What can be swapped --------------------------------------------------------------------------------------------------


class TanhGELU(NewGELUActivation):
    """``gelu_new`` as one operation instead of eight."""

    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, approximate="tanh")


class FusedRMSNorm(nn.Module):
    """The norm of Llama and of the many models that copy it, and of T5, in one pass."""

    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or hidden_states.dtype != self.weight.dtype:
            return super().forward(hidden_states)
        return add_norm(hidden_states, None, self.weight, None, self.variance_epsilon, False)[0]


class FusedSwiGLU(nn.Module):
    """The MLP of Llama and of the many models that copy it: what is between its products in one pass."""

    gate_proj: nn.Module
    up_proj: nn.Module
    down_proj: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return super().forward(x)
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


def sites(model: Any, backend: str) -> Iterator[Site]:
    """Every module of a model that fusion has an opinion on."""
    heads = {name for name, entry in model.head.items() if isinstance(entry, Vocab)}
    for name, module in model.named_modules():
        classes = _classes_around(model, name)
        if name in heads and isinstance(module, nn.Linear):
            yield _head(model, name, module, classes)
        elif isinstance(module, NewGELUActivation):
            yield Site(name, classes, "gelu_new", TanhGELU, "one operation instead of eight")
        elif type(module) in (GELUActivation, GELUTanh):
            yield Site(name, classes, "gelu", None, "is one operation of torch already")
        elif _computes(module, LlamaRMSNorm) or isinstance(module, T5LayerNorm):
            yield _if_triton(name, classes, "root mean square norm", _with(FusedRMSNorm, type(module)), backend)
        elif _computes(module, LlamaMLP) and isinstance(module.act_fn, (nn.SiLU, SiLUActivation)):
            yield _if_triton(name, classes, "SwiGLU", _with(FusedSwiGLU, type(module)), backend)
        elif type(module).__name__.endswith("Attention") and hasattr(module, "config"):
            yield _attention(name, module, classes)


def _head(model: Any, name: str, module: nn.Linear, classes: tuple[type, ...]) -> Site:
    if getattr(model.config, "final_logit_softcapping", None):
        return Site(name, classes, "head and cross entropy", None, "logits are capped by tanh before the loss")
    reason = "loss without logits (training with labels)"
    if isinstance(module, VocabParallelHead):
        return Site(name, classes, "head and cross entropy", DeferredVocabParallelHead, reason, {"deferring": False})
    layout = Layout.divided(tuple(module.weight.shape), 0, (Units(module.weight.shape[0]),), 1)
    attributes = {"deferring": False, "tp": _NO_AXIS, "layouts": {"weight": layout}}
    return Site(name, classes, "head and cross entropy", DeferredHead, reason, attributes)


def _if_triton(name: str, classes: tuple[type, ...], operation: str, cls: type, backend: str) -> Site:
    """A site whose kernel exists for GPUs only; on CPUs torch's own one is no faster than the expression."""
    if backend == "triton":
        return Site(name, classes, operation, cls, "one pass in Triton")
    return Site(name, classes, operation, None, "gains on a GPU, in Triton")


def _computes(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether a module's forward is a copy of another class's: transformers repeats code from model to model."""
    own, other = (inspect.unwrap(kind.forward).__code__ for kind in (type(module), cls) if hasattr(kind, "forward"))
    return (own.co_code, own.co_names, own.co_consts) == (other.co_code, other.co_names, other.co_consts)


def _with(fused: Any, cls: Any) -> type:
    """``cls`` with the forward of ``fused``."""
    if cls.__module__ == __name__:
        return cls  # fused already
    return type(f"Fused{cls.__name__}", (fused, cls), {"__module__": __name__})


def _attention(name: str, module: Any, classes: tuple[type, ...]) -> Site:
    implementation = module.config._attn_implementation
    reason = f"computed by {implementation} attention already"
    if implementation == "eager":
        reason = "eager attention was asked for; attn_implementation='sdpa' is faster where weights are not looked at"
    return Site(name, classes, "attention", None, reason)


def _classes_around(model: nn.Module, name: str) -> tuple[type, ...]:
    """The classes of transformers' layers around a module, its own first if it is one, and that of the model last."""
    found: list[type] = []
    module = model
    for part in name.split(".") if name else ():
        module = getattr(module, part)
        if type(module).__module__.startswith("transformers.models."):
            found.insert(0, type(module))
    return (*found, type(model))
