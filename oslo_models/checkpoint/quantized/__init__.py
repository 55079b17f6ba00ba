"""Reads shards of quantised checkpoints, as plain weights or still quantised; one file per format."""

from oslo_models.checkpoint.quantized.formats import (
    check_not_quantized,
    check_quantization,
    quantization_of,
    take_quantization,
)
from oslo_models.checkpoint.quantized.packed import PackedWeight, PackingReader
from oslo_models.checkpoint.quantized.quantize import quantize
from oslo_models.checkpoint.quantized.reader import DequantizingReader, dequantizing_reader

__all__ = [
    "DequantizingReader",
    "PackedWeight",
    "PackingReader",
    "check_not_quantized",
    "check_quantization",
    "dequantizing_reader",
    "quantization_of",
    "quantize",
    "take_quantization",
]
