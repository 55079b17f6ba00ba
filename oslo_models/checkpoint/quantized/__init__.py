"""Reads shards of quantised checkpoints as plain weights, one file per format."""

from oslo_models.checkpoint.quantized.formats import (
    check_not_quantized,
    check_quantization,
    quantization_of,
    take_quantization,
)
from oslo_models.checkpoint.quantized.reader import dequantizing_reader

__all__ = ["check_not_quantized", "check_quantization", "dequantizing_reader", "quantization_of", "take_quantization"]
