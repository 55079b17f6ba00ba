"""compressed-tensors, the format of llm-compressor. Its library decompresses each region."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.quantized.weight import QuantizedWeight, cover, missing_library, units, within
from oslo_models.sharding.layout import Range

_PACKED = 32
"""Integers of b bits are packed so that 32 of them fill b words."""
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")


class CompressedTensorsWeight(QuantizedWeight):
    """Weight packed as integers of 1 to 8 bits (``pack-quantized``), or stored as int8 or float8.

    Scales are per tensor, per output feature, per group of input features or per block of both. Activation quantisation
    of the checkpoint is ignored.
    """

    suffixes = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    )
    markers = ("weight_scale",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        from compressed_tensors.compressors import BaseCompressor

        if "weight_g_idx" in self.parts:
            raise CheckpointError(
                f"{self.parts['weight_g_idx']}: groups of input features in another order (actorder) cannot be read; "
                'quantise the model with actorder="weight", or load it with the library on one process'
            )
        self.scheme = self._scheme()
        self.is_packed = "weight_packed" in self.parts
        self.compressor = BaseCompressor.get_value_from_registry(self.scheme.format or self.settings["format"])

    @classmethod
    def unreadable(cls, settings: Mapping[str, Any]) -> str | None:
        known = (*_PLAIN, "pack-quantized")
        groups = (settings.get("config_groups") or {}).values()
        formats = {settings.get("format", "dense"), *(group.get("format") for group in groups)} - {None}
        if unknown := sorted(formats - {*known, "mixed-precision"}):
            return f'format="{unknown[0]}" is none of {", ".join(known)}'
        if (status := settings.get("quantization_status", "compressed")) != "compressed":
            return f'quantization_status="{status}" is not "compressed"'
        for name in ("sparsity_config", "transform_config"):
            if settings.get(name) and settings[name].get("format", "") != "dense":
                return f"its {name} changes the weights in another way than by quantising them"
        return missing_library("compressed_tensors")

    @cached_property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.part("weight_shape").tolist() if self.is_packed else self.part_shape("weight")
        return rows, columns

    def read(self, rows: Range, columns: Range, *expert: int) -> Tensor:
        height, width = self._grid()
        wide_rows, wide_columns = cover(rows, height, self.shape[0]), cover(columns, width, self.shape[1])
        blocks = units(wide_rows, height), units(wide_columns, width)
        size = torch.tensor([wide_rows[1] - wide_rows[0], wide_columns[1] - wide_columns[0]])
        state = {"weight_scale": self._scales("weight_scale", wide_rows, wide_columns)}
        bits = self.scheme.weights.num_bits
        if self.is_packed:
            words = (wide_columns[0] * bits // _PACKED, -(-wide_columns[1] * bits // _PACKED))
            state |= {"weight_packed": self.part("weight_packed", wide_rows, words), "weight_shape": size}
        else:
            state["weight"] = self.part("weight", wide_rows, wide_columns)
        if "weight_zero_point" in self.parts and not self.scheme.weights.symmetric:
            state["weight_zero_point"] = self._zero_points(wide_rows, wide_columns, blocks)
        full: Tensor = self.compressor.decompress(state, self.scheme)["weight"]
        return full[within(rows, wide_rows), within(columns, wide_columns)]

    def _grid(self) -> tuple[int, int]:
        """Return the row and column units of independently readable regions."""
        weights = self.scheme.weights
        height, width = weights.block_structure or (1, weights.group_size if self._has("group") else 1)
        if self.is_packed:
            width = math.lcm(width, _PACKED)
            height = math.lcm(height, 1 if weights.symmetric else _PACKED)
        return height, width

    def _has(self, strategy: str) -> bool:
        return bool(self.scheme.weights.strategy == strategy)

    def _scales(self, part: str, rows: Range, columns: Range) -> Tensor:
        """Return the scales, or unpacked zero points, of a region."""
        shape = self.part_shape(part)
        if self._has("tensor") or not shape:
            return self.part(part)
        if self._has("block"):
            height, width = self.scheme.weights.block_structure
            return self.part(part, units(rows, height), units(columns, width))
        if self._has("group"):
            return self.part(part, rows, units(columns, self.scheme.weights.group_size))
        return self.part(part, rows, *[(0, size) for size in shape[1:]])

    def _zero_points(self, rows: Range, columns: Range, blocks: tuple[Range, Range]) -> Tensor:
        if not self.is_packed:
            return self._scales("weight_zero_point", rows, columns)
        bits, shape = self.scheme.weights.num_bits, self.part_shape("weight_zero_point")
        words = (rows[0] * bits // _PACKED, -(-rows[1] * bits // _PACKED))
        groups = units(columns, self.scheme.weights.group_size) if self._has("group") else (0, shape[1])
        return self.part("weight_zero_point", words, groups)

    def _scheme(self) -> Any:
        """Return the library's quantisation scheme of the layer, from the first matching group of layers."""
        from compressed_tensors.quantization import QuantizationConfig
        from compressed_tensors.utils.match import is_match

        layer = next(iter(self.parts.values())).rpartition(".")[0]
        groups = QuantizationConfig.model_validate(self.settings).config_groups.values()
        linear = torch.nn.Linear(1, 1, device="meta")
        for scheme in groups:
            if scheme.weights is not None and is_match(layer, linear, scheme.targets):
                return scheme
        raise CheckpointError(f"{layer} has scales, but no group of quantization_config names it")
