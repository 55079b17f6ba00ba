"""Tabulates how a derived plan shards each module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import nn

from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class ShardingReportRow:
    """A module that holds parameters directly, not only through submodules.

    Attributes:
        name: the module's name in the model.
        kind: the module's class.
        shape: the shape of the weight, or of the first parameter if there is no weight.
        sharding: ``"columns"``, ``"rows"``, ``"channels"``, ``"vocabulary"`` or ``"replicated"``.
        why: the reason why a module is replicated, or the communication that a sharded module needs.
        parameters: the number of parameter elements.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sharding: str
    why: str
    parameters: int


@dataclass(frozen=True)
class ShardingReport:
    """One row per module with parameters. ``str()`` formats them as a table."""

    rows: tuple[ShardingReportRow, ...]

    def __iter__(self) -> Iterator[ShardingReportRow]:
        return iter(self.rows)

    @property
    def sharded_share(self) -> float:
        """The fraction of the parameters that is sharded, from 0 to 1."""
        total = sum(row.parameters for row in self.rows)
        return sum(row.parameters for row in self.rows if row.sharding != "replicated") / total if total else 0.0

    def __str__(self) -> str:
        cells = [("module", "kind", "shape", "sharded by", "")]
        cells += [(row.name, row.kind, str(list(row.shape)), row.sharding, row.why) for row in self.rows]
        widths = [max(len(line[column]) for line in cells) for column in range(4)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, (*widths, 0), strict=True)) for line in cells
        ]
        return "\n".join(
            [*(line.rstrip() for line in lines), f"{self.sharded_share:.0%} of the parameters are sharded"]
        )


def report_of_layouts(model: nn.Module, layouts: dict[str, Layout]) -> ShardingReport:
    """Return the report of a model with a hand-written plan. It gives no reasons."""
    rows = []
    for name, module in model.named_modules():
        own = {leaf: layouts.get(f"{name}.{leaf}".lstrip(".")) for leaf, _ in module.named_parameters(recurse=False)}
        known = {leaf: layout for leaf, layout in own.items() if layout is not None}
        if known:
            first = known.get("weight", next(iter(known.values())))
            sharding = "replicated" if first.dim is None else f"dimension {first.dim}"
            count = sum(prod(layout.shape) for layout in known.values())
            rows.append(ShardingReportRow(name or "(itself)", type(module).__name__, first.shape, sharding, "", count))
    return ShardingReport(tuple(rows))
