"""Entries of derived plans. Their layers give correct outputs to any calling code."""

from __future__ import annotations

from dataclasses import dataclass

from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.plan import ColumnParallel, Replicated, RowParallel, VocabParallel


@dataclass(frozen=True, init=False)
class GatheredColumn(ColumnParallel):
    """Linear layer with sharded output features. The output is gathered when an operation needs it in full.

    Args:
        units: number of indivisible units (attention heads) of each matrix. ``None`` splits single features. With more
            ranks than units, single features are split too, and the output is gathered at once.
        parts: number of matrices of equal size that the weight concatenates.
        lazy: keep the output sharded, as a `ShardedActivation`, until an operation needs it in full.
        transposed: see `ColumnParallel`.
    """

    units: int | None = None
    lazy: bool = False

    def __init__(self, units: int | None = None, parts: int = 1, lazy: bool = False, transposed: bool = False) -> None:
        super().__init__(parts=parts, transposed=transposed)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "lazy", lazy)

    def is_lazy(self, n: int) -> bool:
        """Return whether the output stays sharded over ``n`` ranks."""
        return self.lazy and (self.units is None or self.units >= n)

    def split(self, size: int, n: int) -> EvenSplit:
        """Return the split over ``n`` ranks of each matrix of a weight with ``size`` features in total."""
        inner = size // self.parts
        units = inner if self.units is None or self.units < n else self.units
        return EvenSplit(units, inner // units)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        if shape[dim] // self.parts < n:
            return Layout(shape)  # such as a classifier of two classes over three ranks
        return Layout.sharded(shape, dim, (self.split(shape[dim], n),) * self.parts, n)


@dataclass(frozen=True, init=False)
class SlicedRow(RowParallel):
    """Linear layer with sharded input features. A full input is sliced first.

    Args:
        units: number of indivisible units of the input, equal to ``units`` of the preceding `GatheredColumn`.
        transposed: see `ColumnParallel`.
    """

    units: int | None = None

    def __init__(self, units: int | None = None, transposed: bool = False) -> None:
        super().__init__(transposed=transposed)
        object.__setattr__(self, "units", units)

    def split(self, size: int, n: int) -> EvenSplit:
        """Return the split over ``n`` ranks of a weight with ``size`` input features."""
        return GatheredColumn(self.units).split(size, n)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout(shape) if shape[dim] < n else Layout.sharded(shape, dim, (self.split(shape[dim], n),), n)


@dataclass(frozen=True)
class GatheredConvolution(Replicated):
    """Convolution with sharded output channels, which are gathered at once.

    Args:
        transposed: the weight is stored ``[in, out, ...]``, as in transposed convolutions.
    """

    transposed: bool = False

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        dim = 1 if self.transposed and leaf == "weight" else 0
        return Layout(shape) if shape[dim] < n else Layout.sharded(shape, dim, (EvenSplit(shape[dim]),), n)


@dataclass(frozen=True)
class SummedEmbedding(VocabParallel):
    """Embedding with sharded rows and all-reduced outputs."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if shape[0] < n else super().layout(leaf, shape, n)


@dataclass(frozen=True)
class SplitHeads(Replicated):
    """``nn.MultiheadAttention`` with sharded heads. It is replicated if there are more ranks than heads.

    Args:
        heads: the heads.
    """

    heads: EvenSplit

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        parts = 3 if leaf.startswith("in_proj") else 1
        dim = len(shape) - 1 if leaf in ("bias_k", "bias_v") else 0
        return Layout(shape) if self.heads.count < n else Layout.sharded(shape, dim, (self.heads,) * parts, n)


@dataclass(frozen=True, init=False)
class HeadsRow(SlicedRow):
    """Output projection of an ``nn.MultiheadAttention``, which sums over the heads."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if (self.units or 0) < n else super().layout(leaf, shape, n)


DERIVED = (GatheredColumn, SlicedRow, GatheredConvolution, SummedEmbedding, SplitHeads, HeadsRow)
