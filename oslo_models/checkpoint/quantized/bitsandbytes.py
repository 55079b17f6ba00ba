"""bitsandbytes: nf4 and fp4 in blocks of elements, and int8 per row. The library dequantises each region."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.quantized.weight import QuantizedWeight, cover, missing_library, units, within
from oslo_models.sharding.layout import Range

_STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")


class Bnb4BitWeight(QuantizedWeight):
    """4-bit numbers, two per byte, in blocks of consecutive elements of the flattened weight.

    The block scales (``absmax``) are stored plainly or quantised in blocks themselves.

    Source: Dettmers et al., "QLoRA", 2023.
    """

    suffixes = (
        *("weight", "weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
        *_STATES,
    )
    markers = ("weight.absmax",)

    @classmethod
    def unreadable(cls, settings: Mapping[str, Any]) -> str | None:
        return missing_library("bitsandbytes")

    @cached_property
    def state(self) -> dict[str, Any]:
        """Metadata of the weight: shape, dtype and block sizes."""
        name = next(state for state in _STATES if state in self.parts)
        state: dict[str, Any] = json.loads(bytes(self.part(name).tolist()))
        return state

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.state["shape"]
        return rows, columns

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        (height, width), block = self.shape, self.state["blocksize"]
        wide, flat = cover(columns, block), (rows[0] * width, rows[1] * width)
        is_grid = width % block == 0  # each row has whole blocks; otherwise treat all elements as one row
        grid, own = ((height, width), (rows, wide)) if is_grid else ((1, height * width), ((0, 1), flat))
        own = own[0], cover(own[1], block, grid[1])
        size = (own[0][1] - own[0][0], own[1][1] - own[1][0])
        state = QuantState(
            self._absmax(grid, *own),
            shape=torch.Size(size),
            code=self.part("weight.quant_map"),
            blocksize=block,
            quant_type=self.state["quant_type"],
            dtype=getattr(torch, self.state["dtype"]),
        )
        values: Tensor = dequantize_4bit(self._packed(grid, *own), state).view(size)
        if is_grid:
            return values[:, within(columns, wide)]
        return values[0, within(flat, own[1])].view(rows[1] - rows[0], width)[:, slice(*columns)]

    def _packed(self, grid: tuple[int, int], rows: Range, columns: Range) -> Tensor:
        """Return the bytes of a region of the weight, viewed as a matrix of shape ``grid``."""
        per_item = 2 * self.reader.tensors[self.parts["weight"]].dtype.itemsize  # bytes or the model's dtype
        shape = (grid[0], -(-grid[1] // per_item))
        region = (slice(*rows), slice(*units(columns, per_item)))
        items = self.reader.read_region(self.parts["weight"], region, shape)
        count = (rows[1] - rows[0]) * (columns[1] - columns[0])
        return items.view(torch.uint8).flatten()[: (count + 1) // 2].view(-1, 1)

    def _absmax(self, grid: tuple[int, int], rows: Range, columns: Range) -> Tensor:
        """Return the block scales of the same region."""
        per_row = -(-grid[1] // self.state["blocksize"])
        blocks = rows[0] * per_row, rows[1] * per_row
        size = self.state["nested_blocksize"] if "weight.nested_absmax" in self.parts else 1
        wide = cover(blocks, size, self.part_shape("weight.absmax")[0])
        absmax = self.part("weight.absmax", wide)
        if "weight.nested_absmax" in self.parts:
            from bitsandbytes.functional import dequantize_blockwise

            scales, code = self.part("weight.nested_absmax", units(wide, size)), self.part("weight.nested_quant_map")
            absmax = dequantize_blockwise(absmax, absmax=scales, code=code, blocksize=size)
            absmax = absmax + self.state["nested_offset"]
        chosen = absmax.float()[within(blocks, wide)].view(-1, per_row)
        return (
            chosen[:, slice(*units(columns, self.state["blocksize"]))].flatten().contiguous()
        )  # kernels ignore strides


class Bnb8BitWeight(QuantizedWeight):
    """int8 with the largest absolute value of each row (``SCB``), which maps to 127.

    Source: Dettmers et al., "LLM.int8()", 2022.
    """

    suffixes = ("weight", "SCB", "weight_format")
    markers = ("SCB",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        if "weight_format" in self.parts and (number := int(self.part("weight_format"))):
            raise CheckpointError(
                f"{self.parts['weight_format']} is {number}: the rows of the weight are stored in the order of a GPU "
                "kernel, not one after another; save the model again with bitsandbytes 0.45 or later"
            )

    @classmethod
    def unreadable(cls, settings: Mapping[str, Any]) -> str | None:
        return missing_library("bitsandbytes")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.part_shape("weight")
        return rows, columns

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        from bitsandbytes.functional import int8_vectorwise_dequant

        values: Tensor = int8_vectorwise_dequant(self.part("weight", rows, columns), self.part("SCB", rows))
        return values
