"""Decide by measurement for which numbers of rows the decoder blocks on a CPU are computed in C++.

Timings of products do not suffice. A block without torch calls between its products may be faster although one of the
products is slower. So blocks are timed with their all-reduces, once for each shape on a machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oslo_kernels.kept_timings import KeptTimings, Seconds
from oslo_kernels.linear_timing import gain
from oslo_models.distributed.mesh import Axis
from oslo_models.distributed.object_exchange import agree, gather_objects
from oslo_models.fusion.swap import FusionCandidate

SAMPLED = (1, 2, 4, 8, 16, 32)
"""The numbers of rows to time. Between two of them a block counts as faster if it is faster at both."""
FASTER = 1.02
"""The minimum `gain` of a faster block."""
PAIRS = 5
"""Timed pairs per number of rows."""
KEYS = 64
"""Positions in the cache while a block is timed."""
WEIGHTS = 64 << 20
"""Bytes of weights to cycle through, as `oslo_kernels.linear_timing` does."""

_Timed = Mapping[int, Seconds]
_WAY = "C++"
_kept = KeptTimings()


def decide_blocks(
    model: nn.Module,
    candidates: Iterable[FusionCandidate],
    selected: set[type] | None,
    tp: Axis | None,
    measure: bool,
) -> list[FusionCandidate]:
    """Time the swapped blocks of a model and set the numbers of rows for which they are faster. A collective of ``tp``.

    Without ``measure``, C++ computes all supported numbers of rows.

    Returns:
        The candidates, with the timings as their reason.
    """
    candidates = list(candidates)
    found = [c for c in candidates if "decoding" in c.attributes and c.is_selected(selected)]
    if not found or not measure:
        return candidates
    blocks = {c.module: model.get_submodule(c.module) for c in found}
    with agree(tp, "timing blocks") if tp is not None and tp.size > 1 else nullcontext():
        keys = [_key(block) for block in blocks.values()]
    alike: dict[Any, list[str]] = {}
    for name, key in zip(blocks, zip(*_gathered(tp, keys), strict=True), strict=True):
        alike.setdefault(key, []).append(name)
    decided: dict[str, FusionCandidate] = {}
    by_name = {c.module: c for c in found}
    for key, names in alike.items():
        if all(key):
            timed = _timings([blocks[name] for name in names], str(key[0]), tp)
            for name in names:
                decided[name] = _decided(by_name[name], blocks[name], timed)
    return [decided.get(c.module, c) if "decoding" in c.attributes else c for c in candidates]


def _decided(candidate: FusionCandidate, block: Any, timed: _Timed) -> FusionCandidate:
    won = [rows for rows, seconds in timed.items() if gain(seconds) > FASTER]
    rows = set(won)
    sampled = list(timed)
    for low, high in zip(sampled, sampled[1:], strict=False):
        if low in rows and high in rows:
            rows.update(range(low, high))
    block.decoding.faster = (frozenset(rows), torch.get_num_threads())
    figures = _figures({n: timed[n] for n in won})
    slower = _figures({n: seconds for n, seconds in timed.items() if n not in rows})
    if not won:
        return replace(candidate, cls=None, reason=f"left unfused because it would be slower or level ({slower})")
    others = f"; others as before because it would be slower or level ({slower})" if slower else ""
    return replace(candidate, reason=f"{candidate.reason} ({figures}){others}")


def _figures(timed: _Timed) -> str:
    each = (f"{n} row{'s' * (n > 1)}: {a * 1e6:.0f} vs {b * 1e6:.0f} us" for n, (a, b) in timed.items())
    return ", ".join(each)


def _gathered(tp: Axis | None, found: Any) -> list[Any]:
    """Return the findings of all ranks."""
    return [found] if tp is None or tp.size == 1 else gather_objects(tp, found)


def _key(block: Any) -> str | None:
    """Return the properties that determine a block's time, or ``None`` if C++ cannot compute the block now."""
    with _evaluated(block), torch.no_grad():
        made = block.decoding.block(block)
    if made is None:
        return None
    shapes = [
        f"{'x'.join(map(str, layer.shape))} {layer.weight.dtype}{' in-out' * layer.io}" for layer in made.layers()
    ]
    return f"block of {', '.join(shapes)}, {made.heads} heads of {made.width}, up to {made.most_rows} rows"


def _timings(blocks: list[Any], key: str, tp: Axis | None) -> _Timed:
    """Return seconds of a block in C++ and as before, by rows. All ranks return the pair with the smallest gain."""
    made = blocks[0].decoding.block(blocks[0])
    cycled = blocks[: 1 + WEIGHTS // sum(layer.weight.nbytes for layer in made.layers())]
    processes = 1 if tp is None else tp.size
    key = f"{key}, {len(cycled)} of them, {torch.get_num_threads()} threads, {processes} processes"
    known = _kept.get(key)
    if not all(_gathered(tp, isinstance(known, Mapping))):
        known = {rows: {_WAY: seconds} for rows, seconds in _time(cycled, made.most_rows).items()}
        _kept.add(key, known)
    assert isinstance(known, Mapping)
    each = _gathered(tp, {rows: timed[_WAY] for rows, timed in known.items()})
    return {rows: min((one[rows] for one in each), key=gain) for rows in each[0] if all(rows in one for one in each)}


def _time(blocks: list[Any], most_rows: int) -> dict[int, Seconds]:
    """Time the same number of pairs on all ranks, since blocks all-reduce over them."""
    found = {}
    hidden = blocks[0].decoding.block(blocks[0]).norms[0].weight.numel()
    kept = [block.decoding.faster for block in blocks]
    with torch.no_grad():
        for rows in SAMPLED:
            if rows > most_rows:
                break
            x = torch.full((rows, 1, hidden), 0.5)
            seconds: tuple[list[float], list[float]] = ([], [])
            cache = _FixedCache()
            for turn in range(-1, PAIRS):
                for which in (0, 1) if turn % 2 else (1, 0):
                    block = blocks[(2 * turn + which) % len(blocks)]
                    block.decoding.faster = (frozenset(), 0) if which else None
                    with _evaluated(block):
                        start = time.perf_counter()
                        _call(block, x, cache)
                        taken = time.perf_counter() - start
                    if turn >= 0:  # the first pair is a warm-up
                        seconds[which].append(taken)
            found[rows] = (statistics.median(seconds[0]), statistics.median(seconds[1]))
    for block, faster in zip(blocks, kept, strict=True):
        block.decoding.faster = faster
    return found


def _call(block: Any, x: Tensor, cache: _FixedCache) -> None:
    made = block.decoding.block(block)
    tables = (torch.ones(1, 1, made.width), torch.zeros(1, 1, made.width))
    given = {"position_embeddings": tables} if block.decoding.has_positions else {}
    block.forward(x, attention_mask=None, **{block.cache_name(): cache}, **given)


class _FixedCache:
    """A cache with constant keys and values."""

    def __init__(self) -> None:
        self._made: Tensor | None = None

    def update(self, key: Tensor, value: Tensor, layer: int, **options: Any) -> tuple[Tensor, Tensor]:
        """Return keys and values of `KEYS` positions."""
        if self._made is None:
            rows, groups, _, width = key.shape
            self._made = key.new_full((rows, groups, KEYS, width), 0.5)
        return self._made, self._made


@contextmanager
def _evaluated(block: nn.Module) -> Iterator[None]:
    """Set the block to evaluation mode, without dropout."""
    training = [module for module in block.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
