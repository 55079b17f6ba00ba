"""Training on long sequences: peak memory and CPU time of a step, by the kind of mask."""

from __future__ import annotations

import ctypes
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.definitions import LONG_MASKS, Peer, Result
from benchmarks.instruments import PeakMemory
from benchmarks.measure import tokens

_OPTIONS = {"use_cache": False, "attention_dropout": 0.0}


def train(
    peer: Peer, cls: str, checkpoint: Path, tiny: Path, *, length: int, batch: int, window: int, timed: int
) -> Result:
    """Forward and backward for each kind of mask, after a warm-up on a short batch. One thread.

    CPU time is the median of ``timed`` steps. Memory is the peak of a step above the memory before it.
    """
    import torch

    torch.set_num_threads(1)
    values: dict[str, float] = {}
    losses = []
    for masks in LONG_MASKS:
        model = peer.load(cls, checkpoint, sliding_window=window if masks == "window" else None, **_OPTIONS).train()
        given = _batch(model, masks, batch, length)
        _step(model, {name: value[:, :8] for name, value in given.items()})
        seconds, peaks = [], []
        for _ in range(timed):
            ctypes.CDLL(None).malloc_trim(0)  # memory that earlier steps have freed
            memory, start = PeakMemory(), time.process_time()
            with memory.watched():
                losses.append(_step(model, given))
            seconds.append(time.process_time() - start)
            peaks.append(memory.growth["peak anonymous memory"])
        values[f"peak memory, {masks}"] = statistics.median(peaks)
        values[f"CPU time, {masks}"] = statistics.median(seconds)
    result = Result(values, losses)
    for masks in LONG_MASKS[1:]:
        metric = f"peak memory, {masks}"
        result.references.setdefault("causal masks", {})[metric] = values["peak memory, causal"]
    return result


def _step(model: Any, given: dict[str, Any]) -> float:
    loss = model(**given, labels=given["input_ids"]).loss
    loss.backward()
    model.zero_grad()
    return float(loss.detach())


def _batch(model: Any, masks: str, batch: int, length: int) -> dict[str, Any]:
    """Return rows filled by one text or four packed texts, or with a quarter of padding in every other row."""
    import torch

    given = {"input_ids": tokens(model, batch, length)}
    if masks == "packing":
        given["position_ids"] = torch.arange(length // 4).repeat(batch, 4)
    elif masks == "padding":
        given["attention_mask"] = torch.ones_like(given["input_ids"])
        given["attention_mask"][::2, : length // 4] = 0
    return given
