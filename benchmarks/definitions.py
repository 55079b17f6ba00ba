"""Building blocks of every benchmark: peers, results and their units."""

from __future__ import annotations

import importlib.util
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOKEN_PARTS = (
    *("products", "blocks in C++", "norms", "attention, the rest", "MLP, the rest"),
    *("model, the rest", "generate"),
)
"""The parts of the CPU time of a token."""
CHECKS = ("check of fuse(), first", "check of fuse()", "check of fuse(), alike")
"""The first check in a process, later ones, and the check of a model with the same sizes as a checked one."""
BY_MEMORY, BY_PRODUCTS = LIMITS = ("limit by memory", "limit by products")
"""The measurements of `benchmarks.limits`, shown among the peers of a row."""
LONG_MASKS = ("causal", "window", "packing", "padding")
"""The masks of a training step on long sequences."""
UNITS = {
    "generation": "tokens/s",
    "rollouts": "tokens/s",
    "mixed rows": "tokens/s",
    "memory of mixed rows": "MB",
    "drafts": "tokens/s",
    "right drafts": "%",
    "training step": "s",
    "training": "tokens/s",
    "idle time": "%",
    "saved for backward": "MB",
    "longest row": "tokens",
    "peak memory": "MB",
    "peak anonymous memory": "MB",
    "all-reduces a block, forward": "calls",
    "all-reduces a block, backward": "calls",
    "other collectives a block": "calls",
    "payload a block": "MB",
    "payload outside of blocks": "MB",
    "all-reduce": "us",
    "preprocessing": "tokens/s",
    "building": "s",
    "random access": "samples/s",
    "head and loss": "ms",
    "MLP": "ms",
    "optimizer step": "ms",
    "n-gram blocking": "us",
    "n-gram blocking, cold": "us",
    "forward and backward": "ms",
    "generation of a text": "ms",
    "start": "s",
    "call overhead": "ms",
    "call": "ms",
    "call, p99": "ms",
    "calls": "calls/s",
    "serving": "tokens/s",
    "first token": "ms",
    "first token, p99": "ms",
    "first token, one image": "ms",
    "first token, four images": "ms",
    "first token, with an image": "ms",
    "first token, without images": "ms",
    "serving, CPU": "tokens/CPU s",
    "agreement": "us",
    **{f"peak memory, {masks}": "MB" for masks in LONG_MASKS},
    **{f"CPU time, {masks}": "s" for masks in LONG_MASKS},
    **dict.fromkeys(CHECKS, "ms"),
    **dict.fromkeys(TOKEN_PARTS, "ms"),
    **{
        f"{call}, batch {batch}": "of unfused"
        for call in ("forward", "decoding", "forward and backward")
        for batch in (1, 8, 32)
    },
}


def more_is_better(unit: str) -> bool:
    """Return whether a figure is a rate or a length, not a time, a size or a count of calls."""
    return unit.endswith(("s/s", "s/CPU s")) or unit == "tokens"


@dataclass
class Result:
    """The measurements of one process.

    Attributes:
        values: Values by metric, in the units of ``UNITS``.
        check: Results that must agree between all peers.
        references: Values to compare with that the runner itself provides, by name and metric. Only values
            measured by our own peer get rows.
        pairs: All ratios of each value that is a median of ratios.
    """

    values: dict[str, float]
    check: list[float] = field(default_factory=list)
    references: dict[str, dict[str, float]] = field(default_factory=dict)
    pairs: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of_pairs(cls, pairs: dict[str, list[float]]) -> Result:
        """The median ratios of pairs of calls."""
        return cls({metric: statistics.median(ratios) for metric, ratios in pairs.items()}, pairs=pairs)


Step = Callable[[Any], Any]
"""Takes one optimizer step from token ids ``[batch, length]`` and returns the loss."""


def adamw_trainer(load: Callable[..., Any], cls: str, checkpoint: Path, fused: bool = False) -> tuple[Any, Step]:
    """A model, and a step of AdamW on it."""
    import torch

    model = load(cls, checkpoint).train()
    optimizer = model.fused_adamw(lr=1e-4) if fused else torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, step


@dataclass(frozen=True)
class Peer:
    """A library, or a configuration of a library, under comparison.

    Attributes:
        load: ``load(cls, checkpoint, **kwargs)`` returns a model. A peer of the data pipeline preprocesses and returns
            its duration in seconds.
        trainer: ``trainer(load, cls, checkpoint)`` returns a model and its `Step`.
        needs: Required packages; without them the peer is skipped.
    """

    name: str
    processes: int
    threads: int
    load: Callable[..., Any]
    trainer: Callable[..., tuple[Any, Step]] = adamw_trainer
    needs: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    def missing(self) -> list[str]:
        """The packages in ``needs`` that are not installed."""
        return [package for package in self.needs if importlib.util.find_spec(package) is None]

    def save(self, model: Any, directory: Path) -> None:
        """Save one checkpoint that transformers can load."""
        if hasattr(model, "save_pretrained_with_parallel"):
            model.save_pretrained_with_parallel(directory, save_with_merging=True)
        else:
            model.save_pretrained(directory)
