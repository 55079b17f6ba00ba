"""AWQ: integers of 4 bits with scales and zero points per group of input features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.quantized.weight import QuantizedWeight, cover, units, unpack_words, within
from oslo_models.sharding.layout import Range

_BITS, _PER_WORD = 4, 8
_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of eight neighbouring output features in their 32-bit word."""


class AWQWeight(QuantizedWeight):
    """``scales[g] * (qweight - qzeros[g])`` with ``g = input feature // group_size``, transposed.

    Values and zero points are packed along the output features, in the order of `_ORDER`.

    Source: Lin et al., "AWQ", 2023; the packing is AutoAWQ's for its matrix product ("gemm").
    """

    suffixes = ("qweight", "qzeros", "scales")
    markers = ("qweight",)

    @classmethod
    def unreadable(cls, settings: Mapping[str, Any]) -> str | None:
        if (bits := settings.get("bits", settings.get("w_bit", _BITS))) != _BITS:
            return f"bits={bits} is not {_BITS}"
        if (version := str(settings.get("version", "gemm")).lower()) != "gemm":
            return f'version="{version}" is packed in another way than "gemm"; use a checkpoint with version="gemm"'
        return None

    @property
    def shape(self) -> tuple[int, int]:
        columns, words = self.part_shape("qweight")
        return words * _PER_WORD, columns

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        groups, size = self.part_shape("qzeros")[0], self.shape[1]
        group_of = torch.arange(*columns) // (size // groups)
        some, words = (int(group_of[0]), int(group_of[-1]) + 1), units(rows, _PER_WORD)
        own = within(rows, cover(rows, _PER_WORD))
        weight = unpack_words(self.part("qweight", columns, words), _BITS, 1, _ORDER)[:, own]
        zeros = unpack_words(self.part("qzeros", some, words), _BITS, 1, _ORDER)[:, own]
        scales = self.part("scales", some, rows).float()
        group_of -= some[0]
        return ((weight - zeros[group_of]) * scales[group_of]).T
