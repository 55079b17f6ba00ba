"""float8 weights with one scale per block of rows and columns, as published by DeepSeek and Qwen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.quantized.weight import QuantizedWeight, cover, units, within
from oslo_models.sharding.layout import Range


class Fp8Weight(QuantizedWeight):
    """``weight * weight_scale_inv`` with one scale per block of ``weight_block_size``, or one scale per tensor.

    Blocks at the right and lower edge may be truncated. Scales are floats, or exponents ``e + 127`` stored as bytes.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.2.
    """

    suffixes = ("weight", "weight_scale_inv", "activation_scale", "input_scale")
    markers = ("weight_scale_inv",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        scales, shape = self.part_shape("weight_scale_inv"), self.shape
        if self.reader.tensors[self.parts["weight"]].dtype.itemsize > 1 or len(shape) != 2:
            raise CheckpointError(f"{self.parts['weight']} has scales, but is not a float8 matrix")
        self.block = self.settings.get("weight_block_size") or shape
        if scales not in ((), (1,), tuple(-(-size // unit) for size, unit in zip(shape, self.block, strict=True))):
            raise CheckpointError(
                f"{self.parts['weight_scale_inv']} has shape {scales}, which does not fit a weight of shape {shape} in "
                f"blocks of {tuple(self.block)} (weight_block_size of quantization_config)"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.part_shape("weight")
        return rows, columns

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        return self.part("weight", rows, columns).float() * self._scales(rows, columns)

    def _scales(self, rows: Range, columns: Range) -> Tensor:
        """Return the scale of each element of a region; one scalar if the weight has only one scale."""
        if len(self.part_shape("weight_scale_inv")) < 2:
            return _as_numbers(self.part("weight_scale_inv"))
        (height, width), intervals = self.block, (rows, columns)
        blocks = [units(interval, unit) for interval, unit in zip(intervals, self.block, strict=True)]
        scales = _as_numbers(self.part("weight_scale_inv", *blocks))
        scales = scales.repeat_interleave(height, 0)[within(rows, cover(rows, height))]
        return scales.repeat_interleave(width, 1)[:, within(columns, cover(columns, width))]


def _as_numbers(scales: Tensor) -> Tensor:
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
