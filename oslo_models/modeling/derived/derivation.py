"""Derives the plan of a model: which layers can be sharded, and which of them need no gather in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter
from transformers.pytorch_utils import Conv1D

from oslo_models.layers.gathered import (
    GatheredColumn,
    GatheredConvolution,
    HeadsRow,
    SlicedRow,
    SummedEmbedding,
)
from oslo_models.layers.multihead_attention import SplitHeads
from oslo_models.modeling.derived.report import ShardingReport, ShardingReportRow
from oslo_models.modeling.derived.tracing import Trace, trace_calls
from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.plan import Plan, Replicated

Call = Callable[[nn.Module], Any]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (nn.Linear, Conv1D, nn.Embedding, nn.MultiheadAttention, *_CONVOLUTIONS, *_TRANSPOSED)
_CHANGED_EMBEDDING = "its class changes the result of an embedding, and no call showed how"
_UNTRIED = "no call of the trial reached it"
_TIED = "an nn.MultiheadAttention with weights of other layers stays whole"
_NESTED = "its nn.TransformerEncoder uses nested tensors; with enable_nested_tensor=False it is sharded"
_REASON = "the plan was derived from the model, and says nothing of blocks"


_NOTHING = ShardingReport(())


@dataclass(frozen=True)
class DerivedPlan(Plan):
    """A derived plan. Its entries have full module names, not names relative to a block.

    Attributes:
        report: how each module is sharded.
    """

    report: ShardingReport = _NOTHING


@dataclass
class Findings:
    """The results of `observe`, by the layer names of `templates`."""

    rows: dict[str, set[int | None]] = field(default_factory=dict)
    columns: dict[str, set[tuple[int | None, int, bool]]] = field(default_factory=dict)
    outside: dict[str, str] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)


def observe(probe: nn.Module, calls: Sequence[Call], gather: bool = False) -> Findings:
    """Find layers that can read another layer's sharded outputs, and weights that are read outside of their layer.

    Args:
        probe: a model. Tracing changes it, so discard it afterwards.
        calls: functions that call the model.
        gather: find only which layers are called, and weights that are read outside of their layer.
    """
    layers = _find_layers(probe)
    observable = ("", _CHANGED_EMBEDDING)
    candidates = {name: module for name, module in probe.named_modules() if layers.get(name) in observable}
    for name in [name for name, module in candidates.items() if isinstance(module, nn.MultiheadAttention)]:
        candidates.pop(f"{name}.out_proj", None)  # nn.MultiheadAttention does not call it
    shapes = {name: _features(module) for name, module in candidates.items()}
    keys = templates(probe)  # before tracing changes the classes of layers
    return _generalize(trace_calls(probe, candidates, _tied(probe), list(calls), gather), keys, shapes)


def derive_plan(model: nn.Module, findings: Findings | None = None) -> DerivedPlan:
    """Derive the plan of a model of any class.

    Only layers that were called are sharded. Without findings, every supported layer shards its outputs and gathers
    them at once.

    Args:
        model: the model, with weights or on the meta device. It is not changed.
        findings: observations of a model of the same structure.

    Raises:
        ValueError: the model has lazy modules.
    """
    if lazy := [name for name, param in model.named_parameters() if isinstance(param, UninitializedParameter)]:
        raise ValueError(
            f"some parameters have no shape yet, such as {lazy[0]}: call the model once before you shard it"
        )
    known = _find_layers(model)
    entries: dict[str, Replicated] = {}
    entry: Replicated
    rows, keys = [], templates(model)
    for name, module in model.named_modules():
        params = dict(module.named_parameters(recurse=False))
        if not params:
            continue
        owner = entries.get(name.rpartition(".")[0])
        if isinstance(owner, SplitHeads):
            entry, why = HeadsRow(owner.heads.count), f"by {owner.heads.count} heads; outputs are summed"
        else:
            entry, why = _entry(keys[name], module, known[name], findings)
        entries |= dict.fromkeys([name] if name else list(params), entry)
        rows.append((name, module, why))
    for name, module in model.named_modules(remove_duplicate=False):  # a module may have several names
        if name not in entries and any(True for _ in module.parameters(recurse=False)):
            entries |= dict.fromkeys([name] if name else [], Replicated())
    _untie(model, entries, findings is not None and bool(findings.called))
    report = ShardingReport(tuple(_row(name, module, entries, why) for name, module, why in rows))
    return DerivedPlan(embed=entries, blocks={}, head={}, report=report).with_rules(single_stage_reason=_REASON)


def _find_layers(model: nn.Module) -> dict[str, str]:
    """Map each module with parameters to the reason why it cannot be sharded, or to ``""`` if it can."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    reasons: dict[str, str] = {}
    nested = tuple(f"{name}." for name, module in model.named_modules() if _makes_nested(module))
    tied = _tied(model)
    attentions = {name for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    for name, module in model.named_modules():
        if (owner := name.rpartition(".")[0]) in attentions:
            reasons[name] = reasons[owner] and f"it is part of an nn.MultiheadAttention: {reasons[owner]}"
            if name in tied:
                reasons[name] = reasons[owner] = _TIED
        elif any(True for _ in module.parameters(recurse=False)):
            several = places[id(module)] > 1
            reasons[name] = "it is in several places of the model" if several else _reason_against(module)
            if name in attentions and name in tied:
                reasons[name] = _TIED
    inside = {name: _NESTED for name in reasons if nested and name.startswith(nested)}
    return reasons | inside


def _makes_nested(module: nn.Module) -> bool:
    """Whether a module may call its layers with nested tensors, which bypasses their hooks."""
    return isinstance(module, nn.TransformerEncoder) and bool(module.use_nested_tensor)


def _reason_against(module: nn.Module) -> str:
    kind = next((kind for kind in _LAYERS if isinstance(module, kind)), None)
    if kind is None:
        if "Norm" in type(module).__name__:
            return "a normalisation is small"
        return f"{type(module).__name__} is not among the layers that can be sharded"
    if type(module).forward is not kind.forward or "forward" in vars(module):
        changes = f"its class {type(module).__name__} changes the result of the layer"
        return _CHANGED_EMBEDDING if kind is nn.Embedding and "forward" not in vars(module) else changes
    if any(type(param) is not nn.Parameter for param in module.parameters(recurse=False)):
        return "its parameters are of a subclass of nn.Parameter"
    if isinstance(module, nn.MultiheadAttention):
        return ""
    if module._parameters.keys() - {"weight", "bias"} or "weight" not in module._parameters:
        return "its weight is computed from other parameters"
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        return "max_norm, scale_grad_by_freq and sparse need all rows of an embedding"
    if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1:
        return "the convolution has groups"
    return ""


def _tied(model: nn.Module) -> set[str]:
    """Return the names of modules that share weights with other modules."""
    named = list(model.named_parameters(remove_duplicate=False))
    counts = Counter(id(param) for _, param in named)
    return {name.rpartition(".")[0] for name, param in named if counts[id(param)] > 1}


def templates(model: nn.Module) -> dict[str, str]:
    """Map all module names to templates that do not depend on the depth of the model.

    Children with the same structure share one template in place of their numbers: ``*`` for the first structure,
    ``*1`` for the second, and so on. The layers of an ``nn.Sequential`` keep their numbers, since each has another
    function.
    """
    found, kinds = {"": ""}, dict[Any, int]()
    for name, child in model._modules.items():
        if child is None:
            continue
        inner, key = templates(child), name
        if name.isdigit() and (child._modules or not isinstance(model, nn.Sequential)):
            kind = frozenset(
                (inner[own], *kind_of(module)) for own, module in child.named_modules(remove_duplicate=False)
            )
            number = kinds.setdefault(kind, len(kinds))
            key = f"*{number}" if number else "*"
        found |= {f"{name}.{own}".rstrip("."): f"{key}.{other}".rstrip(".") for own, other in inner.items()}
    return found


def kind_of(module: nn.Module) -> tuple[str, tuple[str, ...]]:
    """Return the class name of a module and its parameter names."""
    return type(module).__name__, tuple(leaf for leaf, _ in module.named_parameters(recurse=False))


def _features(module: nn.Module) -> tuple[int, int]:
    """Return the output and input sizes of a linear layer."""
    if isinstance(module, nn.Linear):
        return module.out_features, module.in_features
    return (module.nf, module.nx) if isinstance(module, Conv1D) else (0, 0)


def _generalize(trace: Trace, keys: dict[str, str], shapes: dict[str, tuple[int, int]]) -> Findings:
    """Generalise a small model's trace to any size: names become templates, and full sizes become ``None``."""
    found = Findings(called={key for name, key in keys.items() if name in trace.called})
    found.called -= {keys[name] for name in shapes.keys() - trace.called}  # one of several blocks may skip a layer
    for name, (outputs, inputs) in shapes.items():
        key = keys[name]
        if name in trace.outside:
            found.outside[key] = trace.outside[name]
        if name in trace.rows:
            units = trace.rows[name]
            found.rows.setdefault(key, set()).add(None if units == inputs else units)
        elif name in trace.columns:
            parts = trace.parts.get(name, 1)
            units = trace.units.get(name, 0)
            chosen = None if units in (0, outputs // parts) else units
            found.columns.setdefault(key, set()).add((chosen, parts, name in trace.lazy))
    return found


def _entry(key: str, module: nn.Module, reason: str, findings: Findings | None) -> tuple[Replicated, str]:
    """Return the entry of a module and its text in the report. ``key`` is the module's name in `templates`."""
    if reason and not (reason == _CHANGED_EMBEDDING and findings is not None and key in findings.called):
        return Replicated(), reason
    if findings is not None and key not in findings.called:
        return Replicated(), _UNTRIED
    if findings is not None and key in findings.outside:
        return Replicated(), f"its weight is read outside of the layer, by {findings.outside[key]}"
    if isinstance(module, nn.MultiheadAttention):
        heads = EvenSplit(module.num_heads, module.head_dim)
        return SplitHeads(heads), f"by {module.num_heads} heads"
    if isinstance(module, nn.Embedding):
        return SummedEmbedding(), "outputs are summed"
    if isinstance(module, (*_CONVOLUTIONS, *_TRANSPOSED)):
        return GatheredConvolution(isinstance(module, _TRANSPOSED)), "outputs are gathered"
    transposed = isinstance(module, Conv1D)
    rows, columns = (findings.rows.get(key), findings.columns.get(key)) if findings else (None, None)
    outputs, inputs = _features(module)
    if rows and not columns and len(rows) == 1 and inputs % ((units := min(rows)) or 1) == 0:  # type: ignore[type-var]
        return SlicedRow(units, transposed), f"by {units} heads; outputs are summed" if units else "outputs are summed"
    if columns and not rows and len(columns) == 1:
        units, parts, lazy = next(iter(columns))
        if lazy and outputs % (parts * (units or 1)) == 0:
            told = [f"{parts} matrices"] * (parts > 1) + [f"by {units} heads"] * (units is not None)
            return GatheredColumn(units, parts, True, transposed), "; ".join([*told, "outputs stay sharded"])
    return GatheredColumn(transposed=transposed), "outputs are gathered"


def _untie(model: nn.Module, entries: dict[str, Replicated], observed: bool) -> None:
    """Give tied parameters the same layout in all modules.

    They keep the layout of a sharded layer if no other code reads them. Otherwise they are replicated.

    Args:
        observed: whether calls were traced. If so, weights that other code reads are replicated already.
    """
    places: dict[int, list[tuple[str, str, tuple[int, ...]]]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        if owner in entries:
            places.setdefault(id(param), []).append((owner, leaf, tuple(param.shape)))
    changed = True
    while changed:
        changed = False
        for tied in places.values():
            layouts = {_layout(entries, owner, leaf, shape) for owner, leaf, shape in tied}
            if len(layouts) == 1:
                continue
            changed = True
            holders = [owner for owner, _, _ in tied if not isinstance(model.get_submodule(owner), _LAYERS)]
            rows = {_layout(entries, owner, leaf, shape) for owner, leaf, shape in tied if owner not in holders}
            if observed and rows == {SummedEmbedding().layout(tied[0][1], tied[0][2], 2)}:
                entries |= {f"{owner}.{leaf}": SummedEmbedding() for owner, leaf, _ in tied if owner in holders}
            else:
                for owner, leaf, _ in tied:
                    entries.pop(f"{owner}.{leaf}", None)
                    entries[owner] = Replicated()
    for name, module in model.named_modules():
        own = [f"{name}.{leaf}" for leaf, _ in module.named_parameters(recurse=False)]
        if own and all(each in entries for each in own):
            entries.pop(name, None)


def _layout(entries: dict[str, Replicated], owner: str, leaf: str, shape: tuple[int, ...]) -> Layout:
    return entries.get(f"{owner}.{leaf}", entries[owner]).layout(leaf, shape, 2)


_NAMES = {
    GatheredColumn: "columns",
    SlicedRow: "rows",
    GatheredConvolution: "channels",
    SummedEmbedding: "vocabulary",
    SplitHeads: "heads",
    HeadsRow: "rows",
    Replicated: "replicated",
}


def _row(name: str, module: nn.Module, entries: dict[str, Replicated], why: str) -> ShardingReportRow:
    params = dict(module.named_parameters(recurse=False))
    first = params.get("weight", next(iter(params.values())))
    entry = entries.get(name) or entries[f"{name}.{next(iter(params))}".lstrip(".")]
    sharding = _NAMES[type(entry)]
    if sharding == "replicated" and why.startswith(("outputs", "by ")):
        why = "it is tied to a layer that would be sharded otherwise"
    count = sum(param.numel() for param in params.values())
    return ShardingReportRow(name or "(itself)", type(module).__name__, tuple(first.shape), sharding, why, count)
