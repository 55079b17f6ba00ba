"""`QuantizedWeight`: base class of the formats of quantised checkpoints."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from oslo_models.checkpoint.reader import CheckpointReader
from oslo_models.sharding.layout import Range


class QuantizedWeight(ABC):
    """Weight of a linear layer or of stacked experts, stored as quantised values and scales in a checkpoint.

    Attributes:
        reader: the checkpoint.
        parts: the names of the stored tensors, by their suffix after the path of the layer.
        settings: the ``quantization_config`` of the checkpoint.
        suffixes: the suffixes of all tensors that replace the weight in this format.
        markers: a layer is quantised if it has a tensor with one of these suffixes.
        separator: the string between the path of the layer and a suffix.
        plain_suffix: the suffix of the plain weight after the path of the layer.
        can_stay: whether the weight can stay quantised in a layer (`PackedWeight`); stacked experts cannot.
        is_transposed: the model always stores ``[in, out]``. Otherwise the layer determines the order.
    """

    separator: ClassVar[str] = "."
    plain_suffix: ClassVar[str] = ".weight"
    is_transposed: ClassVar[bool] = False
    can_stay: ClassVar[bool] = True
    suffixes: ClassVar[tuple[str, ...]]
    markers: ClassVar[tuple[str, ...]]

    def __init__(self, reader: CheckpointReader, parts: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        self.reader, self.parts, self.settings = reader, parts, settings

    @classmethod
    def unreadable(cls, settings: Mapping[str, Any]) -> str | None:
        """Return why this variant of the format cannot be read, with a remedy; ``None`` if it can."""
        return None

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight: ``(out_features, in_features)``, or ``(experts, out_features, in_features)``."""

    @abstractmethod
    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        """Read and dequantise a region of the weight.

        Args:
            rows: the range of output features.
            columns: the range of input features.
            expert: the index of the expert, for stacked experts.

        Returns:
            ``[rows, columns]`` in the floating-point dtype of the format's dequantisation.
        """

    def part(self, suffix: str, *ranges: Range) -> Tensor:
        """Read a region of one stored tensor; the full tensor without ``ranges``."""
        full = [(0, size) for size in self.part_shape(suffix)]
        return self.reader.read_region(self.parts[suffix], tuple(slice(*each) for each in ranges or full))

    def part_shape(self, suffix: str) -> tuple[int, ...]:
        """Return the shape of one stored tensor."""
        return self.reader.tensors[self.parts[suffix]].shape


def missing_library(name: str) -> str | None:
    """Return an error text if a format's library is not installed; ``None`` if it is."""
    if importlib.util.find_spec(name) is not None:
        return None
    return f"its library is not installed: pip install {name.replace('_', '-')}"


def cover(interval: Range, unit: int, size: int | None = None) -> Range:
    """Return the smallest range of whole units that contains ``interval``, truncated at ``size``."""
    start, stop = interval[0] // unit * unit, -(-interval[1] // unit) * unit
    return start, stop if size is None else min(stop, size)


def units(interval: Range, unit: int) -> Range:
    """Return the index range of the units of ``unit`` elements that contain ``interval``."""
    return interval[0] // unit, -(-interval[1] // unit)


def within(interval: Range, outer: Range) -> slice:
    """Return the slice of ``interval`` in a tensor that starts at the start of ``outer``."""
    return slice(interval[0] - outer[0], interval[1] - outer[0])


def unpack_words(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Unpack unsigned integers of ``bits`` bits, the first in the lowest bits of each 32-bit word.

    Args:
        words: int32, of two dimensions.
        bits: a divisor of 32.
        dim: the dimension along which the integers are packed.
        order: the position of each integer in its word, counted from the lowest bits.

    Returns:
        int32; the size of ``dim`` is multiplied by ``32 / bits``.
    """
    positions = torch.tensor(order or range(32 // bits), dtype=torch.int32)
    shifts = (positions * bits).view(1, -1, 1) if dim == 0 else positions * bits
    return ((words.unsqueeze(dim + 1) >> shifts) & ((1 << bits) - 1)).flatten(dim, dim + 1)
