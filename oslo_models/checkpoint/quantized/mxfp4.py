"""mxfp4: stacked experts as 4-bit floating-point numbers in blocks of 32, as in gpt-oss."""

from __future__ import annotations

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.quantized.weight import QuantizedWeight, cover, units, within
from oslo_models.sharding.layout import Range

_BLOCK, _PER_BYTE = 32, 2
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the three bits below the sign bit."""


class Mxfp4Weight(QuantizedWeight):
    """``2 ** (scale - 127)`` times numbers of one sign, two exponent and one mantissa bits.

    Each byte has two numbers, the first in the low bits. Blocks are along the input features. Tensors are ``blocks``
    ``[experts, out, in / 32, 16]`` and ``scales`` ``[experts, out, in / 32]``; the model holds ``[experts, in, out]``.

    Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0, 2023.
    """

    separator, plain_suffix, is_transposed, can_stay = "_", "", True, False
    suffixes = ("blocks", "scales")
    markers = ("blocks",)

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        blocks, scales = self.part_shape("blocks"), self.part_shape("scales")
        if len(blocks) != 4 or blocks[3] * _PER_BYTE != _BLOCK or scales != blocks[:3]:
            raise CheckpointError(
                f"{self.parts['blocks']} has shape {blocks} and its scales {scales}, and not [experts, out, groups, "
                f"{_BLOCK // _PER_BYTE}] and [experts, out, groups]"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.part_shape("blocks")
        return experts, rows, groups * _BLOCK

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        one, groups, wide = (expert[0], expert[0] + 1), units(columns, _BLOCK), cover(columns, _BLOCK)
        packed = self.part("blocks", one, rows, groups, (0, _BLOCK // _PER_BYTE))[0]
        exponents = self.part("scales", one, rows, groups)[0].int() - 127
        codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2).int()  # [rows, groups, 32]
        numbers = torch.tensor([*_MAGNITUDES, *(-x for x in _MAGNITUDES)])[codes]
        values = torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2)
        return values[:, within(columns, wide)]
