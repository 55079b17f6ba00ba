"""Measures in which linear layers of a model on a CPU the products of `oslo_kernels.linear` are faster than torch's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels import linear
from oslo_kernels.linear_timing import Timings, faster_rows, gain, timings
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.fusion.swap import FusionCandidate

_Found = Timings | str
"""What was measured, or why nothing was."""


def decide(
    model: nn.Module, fusion_candidates: Iterable[FusionCandidate], selected: set[type] | None, tp: Axis | None
) -> list[FusionCandidate]:
    """``fusion_candidates`` with those that are selected and ``timed`` decided upon, alike on all ranks of the tp axis.

    A layer is fused if its product is faster, on every rank, for some number of rows; others are left to torch.
    """
    fusion_candidates = list(fusion_candidates)
    modules = {
        s.module: model.get_submodule(s.module) for s in fusion_candidates if s.timed and s.is_selected(selected)
    }
    if tp is None or tp.size == 1:
        found = _measure(modules)
    else:
        with agree(tp, "timing linear layers"):
            own = _measure(modules)
        found = _least(gather_objects(tp, own))
    return [
        _decided(site, modules[site.module], found[site.module]) if site.module in found else site
        for site in fusion_candidates
    ]


def _measure(modules: Mapping[str, Any]) -> dict[str, _Found]:
    """By module; modules of one shape and dtype are measured together."""
    found: dict[str, _Found] = {}
    alike: dict[Any, list[str]] = {}
    for name, module in modules.items():
        io, weight = isinstance(module, Conv1D), module.weight
        if why := linear.why_torch(weight, module.bias, io):
            found[name] = why
        else:
            alike.setdefault((io, tuple(weight.shape), weight.dtype, module.bias is None), []).append(name)
    for (io, *_), names in alike.items():
        layers = [(modules[name].weight, modules[name].bias) for name in names]
        found.update(dict.fromkeys(names, timings(layers, io)))
    return found


def _least(ranks: list[dict[str, _Found]]) -> dict[str, _Found]:
    """Of what the ranks found, what gains least: the others wait for that one."""
    found: dict[str, _Found] = {}
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        if reasons := [one for one in each if isinstance(one, str)]:
            found[name] = reasons[0]
        else:
            measured = [one for one in each if not isinstance(one, str)]
            found[name] = {rows: min((one[rows] for one in measured), key=gain) for rows in measured[0]}
    return found


def _decided(site: FusionCandidate, module: Any, found: _Found) -> FusionCandidate:
    kept = "" if site.otherwise is None else f"{site.reason}; product "
    if isinstance(found, str):
        return replace(site, cls=site.otherwise, reason=f"{kept}left to torch: {found}", timed=False)
    faster = faster_rows(found, module.weight.dtype)
    won = {rows: pair for rows, pair in found.items() if rows in faster.rows}
    lost = {rows: pair for rows, pair in found.items() if rows not in faster.rows}
    level = any(gain(pair) >= 1 for pair in lost.values())
    slower = f"because it would be slower{' or level' if level else ''} ({_figures(lost)})"
    attributes = {**site.attributes, "faster": faster}
    if not won:
        attributes = attributes if site.otherwise else site.attributes
        reason = f"{kept}left unfused {slower}"
        return replace(site, cls=site.otherwise, reason=reason, attributes=attributes, timed=False)
    reason = f"{site.reason}{', product in C++' if kept else ''} ({_figures(won)})"
    reason += f"; others left to torch {slower}" if lost else ""
    return replace(site, reason=reason, attributes=attributes, timed=False)


def _figures(found: Timings) -> str:
    rows = [f"{n} row{'s' * (n > 1)}: {ours * 1e6:.0f} vs {torchs * 1e6:.0f} us" for n, (ours, torchs) in found.items()]
    return ", ".join(rows)
