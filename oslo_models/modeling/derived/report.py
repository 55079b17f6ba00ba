"""What a derived plan shards how, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from torch import nn

from oslo_models.sharding.layout import Layout


@dataclass(frozen=True)
class Row:
    """One module with parameters of its own.

    Attributes:
        name: its name in the model.
        kind: its class.
        shape: the shape of its weight, or of its first parameter.
        sharding: ``"columns"``, ``"rows"``, ``"channels"``, ``"vocabulary"`` or ``"replicated"``.
        why: for what is replicated, the reason; for the others, what is communicated.
        parameters: how many elements its parameters have.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    sharding: str
    why: str
    parameters: int


@dataclass(frozen=True)
class ShardingReport:
    """The rows of all modules with parameters; printed, it is a table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @property
    def sharded_share(self) -> float:
        """The share of the parameters that is sharded, from 0 to 1."""
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
    """The report of a model whose plan was written: it gives no reasons."""
    rows = []
    for name, module in model.named_modules():
        own = {leaf: layouts.get(f"{name}.{leaf}".lstrip(".")) for leaf, _ in module.named_parameters(recurse=False)}
        known = {leaf: layout for leaf, layout in own.items() if layout is not None}
        if known:
            first = known.get("weight", next(iter(known.values())))
            sharding = "replicated" if first.dim is None else f"dimension {first.dim}"
            count = sum(prod(layout.shape) for layout in known.values())
            rows.append(Row(name or "(itself)", type(module).__name__, first.shape, sharding, "", count))
    return ShardingReport(tuple(rows))
