"""Decide by measurement which linear layers of a model on a CPU to fuse: a layer needs a faster product."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from oslo_kernels import linear
from oslo_kernels.huge_pages import collapse
from oslo_kernels.kept_timings import Seconds, Timings
from oslo_kernels.linear_timing import faster_rows, fastest, gain, timings
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.distributed.sharded_tensor import local_tensor, without_override
from oslo_models.fusion.swap import FusionCandidate

_Measured = Timings | str
"""The timings of a layer (empty: fuse it untimed), or the reason for leaving it to torch untimed."""


def decide(
    model: nn.Module,
    fusion_candidates: Iterable[FusionCandidate],
    selected: set[type] | None,
    tp: Axis | None,
    measure: bool = True,
) -> list[FusionCandidate]:
    """Decide on the selected ``timed`` candidates among ``fusion_candidates``: the same on all ranks of ``tp``.

    A layer is fused for the numbers of rows for which its product is faster on every rank of the axis. Without
    ``measure``, it is fused for all numbers of rows that the kernel supports.
    """
    fusion_candidates = list(fusion_candidates)
    modules = {
        candidate.module: model.get_submodule(candidate.module)
        for candidate in fusion_candidates
        if candidate.timed and candidate.is_selected(selected)
    }
    if tp is None or tp.size == 1:
        measured = _measure(modules, measure)
    else:
        with agree(tp, "timing linear layers"):
            own = _measure(modules, measure, tp.size)
        measured = _slowest(gather_objects(tp, own))
    return [
        _decided(candidate, modules[candidate.module], measured[candidate.module])
        if candidate.module in measured
        else candidate
        for candidate in fusion_candidates
    ]


def use_huge_pages(model: nn.Module, candidates: Iterable[FusionCandidate], selected: set[type] | None) -> None:
    """Move the weights of the selected linear layers, or their narrow copies, to huge pages, which are read faster."""
    weights: list[Tensor] = []
    for candidate in candidates:
        if candidate.is_selected(selected) and (candidate.timed or "narrow" in candidate.attributes):
            narrow = candidate.attributes.get("narrow")
            weight: Any = model.get_submodule(candidate.module).weight if narrow is None else narrow.values
            weights.append(local_tensor(weight).detach())
    collapse(weights)


def _measure(modules: Mapping[str, Any], measure: bool, processes: int = 1) -> dict[str, _Measured]:
    """Return the timings by module. Modules of one shape and dtype are timed together."""
    found: dict[str, _Measured] = {}
    alike: dict[Any, list[str]] = {}
    for name, module in modules.items():
        io, weight = isinstance(module, Conv1D), module.weight
        if isinstance(why := linear.ways_of(weight, module.bias, io), str):
            found[name] = why
        elif not measure:
            found[name] = {}
        else:
            alike.setdefault((io, tuple(weight.shape), weight.dtype, module.bias is None), []).append(name)
    for (io, *_), names in alike.items():
        layers = [(modules[name].weight, modules[name].bias) for name in names]
        with without_override():  # products with the weights of shards outside of their layers
            found.update(dict.fromkeys(names, timings(layers, io, processes)))
    return found


def _slowest(ranks: list[dict[str, _Measured]]) -> dict[str, _Measured]:
    """Return the timings of the rank with the smallest gain, since the others wait for it."""
    found: dict[str, _Measured] = {}
    for name in ranks[0]:
        each = [rank[name] for rank in ranks]
        if reasons := [one for one in each if isinstance(one, str)]:
            found[name] = reasons[0]
        else:
            measured = [one for one in each if not isinstance(one, str)]
            common = {
                rows: {way: min((one[rows][way] for one in measured), key=gain) for way in ways}
                for rows in measured[0]
                if (ways := set(measured[0][rows]).intersection(*(one.get(rows, ()) for one in measured)))
            }
            found[name] = common if common or not measured[0] else "the ranks have no way of computing it in common"
    return found


def _decided(candidate: FusionCandidate, module: Any, found: _Measured) -> FusionCandidate:
    kept = "" if candidate.otherwise is None else f"{candidate.reason}; product "
    if isinstance(found, str):
        none = {"faster": linear.FasterRows({}, None, module.weight.dtype, torch.get_num_threads())} if kept else {}
        return replace(
            candidate,
            cls=candidate.otherwise,
            reason=f"{kept}left to torch: {found}",
            attributes={**candidate.attributes, **none},
            timed=False,
        )
    if not found:
        return replace(
            candidate, reason=f"{candidate.reason}{', product' * bool(kept)} in C++ (not timed)", timed=False
        )
    faster = faster_rows(found, module.weight.dtype)
    best = {rows: fastest(ways) for rows, ways in found.items()}
    won = {rows: timed for rows, timed in best.items() if rows in faster.ways}
    lost = {rows: timed for rows, timed in best.items() if rows not in faster.ways}
    level = any(gain(pair) >= 1 for _, pair in lost.values())
    slower = f"because it would be slower{' or level' if level else ''} ({_figures(lost)})"
    attributes = {**candidate.attributes, "faster": faster}
    if not won:
        attributes = attributes if candidate.otherwise else candidate.attributes
        reason = f"{kept}left unfused {slower}"
        return replace(candidate, cls=candidate.otherwise, reason=reason, attributes=attributes, timed=False)
    ways = sorted({way for way, _ in won.values()})
    by_way = [f"{way}, {_figures({n: timed for n, timed in won.items() if timed[0] == way})}" for way in ways]
    reason = f"{candidate.reason}{', product' * bool(kept)} (by {'; by '.join(by_way)})"
    reason += f"; others left to torch {slower}" if lost else ""
    return replace(candidate, reason=reason, attributes=attributes, timed=False)


def _figures(found: Mapping[int, tuple[str, Seconds]]) -> str:
    rows = [
        f"{n} row{'s' * (n > 1)}: {ours * 1e6:.0f} vs {torchs * 1e6:.0f} us" for n, (_, (ours, torchs)) in found.items()
    ]
    return ", ".join(rows)
