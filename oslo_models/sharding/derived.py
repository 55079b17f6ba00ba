"""Entries of derived plans: layers whose outputs are right for any code that calls them."""

from __future__ import annotations

from dataclasses import dataclass

from oslo_models.sharding.layout import EvenSplit, Layout
from oslo_models.sharding.plan import ColumnParallel, Replicated, RowParallel, VocabParallel


@dataclass(frozen=True, init=False)
class GatheredColumn(ColumnParallel):
    """A linear layer with sharded outputs, which are gathered where they are needed in full.

    Args:
        units: how many indivisible units (attention heads) a matrix consists of; ``None``: each feature by itself. Over
            more ranks than units, features are split as if by ``None``, and the output is gathered at once.
        parts: how many matrices of equal size the weight concatenates.
        lazy: the output stays sharded, as a `ShardedActivation`, until an operation needs it in full.
        transposed: as of `ColumnParallel`.
    """

    units: int | None = None
    lazy: bool = False

    def __init__(self, units: int | None = None, parts: int = 1, lazy: bool = False, transposed: bool = False) -> None:
        super().__init__(parts=parts, transposed=transposed)
        object.__setattr__(self, "units", units)
        object.__setattr__(self, "lazy", lazy)

    def is_lazy(self, n: int) -> bool:
        """Whether the output stays sharded over ``n`` ranks."""
        return self.lazy and (self.units is None or self.units >= n)

    def split(self, size: int, n: int) -> EvenSplit:
        """How each matrix of a weight with ``size`` features in all is split over ``n`` ranks."""
        inner = size // self.parts
        units = inner if self.units is None or self.units < n else self.units
        return EvenSplit(units, inner // units)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        if shape[dim] // self.parts < n:
            return Layout(shape)  # such as a head with two classes over three ranks
        return Layout.sharded(shape, dim, (self.split(shape[dim], n),) * self.parts, n)


@dataclass(frozen=True, init=False)
class SlicedRow(RowParallel):
    """A linear layer with sharded inputs. A full input is sliced first.

    Args:
        units: how many indivisible units its input consists of, as those of the `GatheredColumn` before it.
        transposed: as of `ColumnParallel`.
    """

    units: int | None = None

    def __init__(self, units: int | None = None, transposed: bool = False) -> None:
        super().__init__(transposed=transposed)
        object.__setattr__(self, "units", units)

    def split(self, size: int, n: int) -> EvenSplit:
        """How a weight with ``size`` input features is split over ``n`` ranks."""
        return GatheredColumn(self.units).split(size, n)

    def _sharded(self, shape: tuple[int, ...], dim: int, n: int) -> Layout:
        return Layout(shape) if shape[dim] < n else Layout.sharded(shape, dim, (self.split(shape[dim], n),), n)


@dataclass(frozen=True)
class GatheredConvolution(Replicated):
    """A convolution with sharded output channels, which are gathered at once.

    Args:
        transposed: the weight is stored ``[in, out, ...]``, as those of transposed convolutions.
    """

    transposed: bool = False

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        dim = 1 if self.transposed and leaf == "weight" else 0
        return Layout(shape) if shape[dim] < n else Layout.sharded(shape, dim, (EvenSplit(shape[dim]),), n)


@dataclass(frozen=True)
class SummedEmbedding(VocabParallel):
    """An embedding with sharded rows, whose outputs are summed over the ranks."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if shape[0] < n else super().layout(leaf, shape, n)


@dataclass(frozen=True)
class SplitHeads(Replicated):
    """An ``nn.MultiheadAttention`` whose heads are sharded; over more ranks than heads it is replicated.

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
    """The last layer of an ``nn.MultiheadAttention``, which sums over the heads."""

    def layout(self, leaf: str, shape: tuple[int, ...], n: int) -> Layout:
        return Layout(shape) if (self.units or 0) < n else super().layout(leaf, shape, n)


DERIVED = (GatheredColumn, SlicedRow, GatheredConvolution, SummedEmbedding, SplitHeads, HeadsRow)
