"""Formats of quantised checkpoints: selects the reader of a format and raises errors for unsupported formats."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from oslo_models.checkpoint.quantized.awq import AWQWeight
from oslo_models.checkpoint.quantized.bitsandbytes import Bnb4BitWeight, Bnb8BitWeight
from oslo_models.checkpoint.quantized.compressed_tensors import CompressedTensorsWeight
from oslo_models.checkpoint.quantized.fp8 import Fp8Weight
from oslo_models.checkpoint.quantized.gptq import GPTQWeight
from oslo_models.checkpoint.quantized.mxfp4 import Mxfp4Weight
from oslo_models.checkpoint.quantized.weight import QuantizedWeight

FORMATS: dict[str, type[QuantizedWeight]] = {
    "fp8": Fp8Weight,
    "mxfp8": Fp8Weight,
    "mxfp4": Mxfp4Weight,
    "gptq": GPTQWeight,
    "awq": AWQWeight,
    "compressed-tensors": CompressedTensorsWeight,
    "bitsandbytes_4bit": Bnb4BitWeight,
    "bitsandbytes_8bit": Bnb8BitWeight,
}
"""Supported formats by the result of `format_name`."""


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a model's configuration; ``None`` for plain weights."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    return dict(settings) if isinstance(settings, Mapping) else dict(settings.to_dict())


def take_quantization(config: Any) -> dict[str, Any] | None:
    """Remove the ``quantization_config`` from a configuration and return it. The model then has plain weights."""
    settings = quantization_of(config)
    if settings is not None:
        del config.quantization_config
    return settings


def format_name(settings: Mapping[str, Any]) -> str:
    """Return transformers' ``quant_method``. For bitsandbytes, add the bits, since it has two formats."""
    method = settings.get("quant_method") or "bitsandbytes"  # early versions did not write quant_method
    method = str(getattr(method, "value", method))
    if method == "bitsandbytes":
        return f"{method}_4bit" if settings.get("load_in_4bit") or settings.get("_load_in_4bit") else f"{method}_8bit"
    return method


def format_of(settings: Mapping[str, Any]) -> type[QuantizedWeight]:
    """Return the class that reads a format.

    Raises:
        ValueError: the format or this variant of it is not supported.
    """
    name = format_name(settings)
    reason = FORMATS[name].unreadable(settings) if name in FORMATS else f"the formats that can are {', '.join(FORMATS)}"
    if reason is not None:
        raise ValueError(
            f"weights quantised as {name} cannot be read from this checkpoint: {reason}. With transformers on one "
            "process, a model can be loaded, dequantised by its method dequantize(), and saved as plain weights"
        )
    return FORMATS[name]


def check_quantization(settings: Mapping[str, Any], dequantize: bool) -> None:
    """Check that a quantised checkpoint can be loaded with this value of ``dequantize``.

    Raises:
        ValueError: the format is not supported, or it is supported only with ``dequantize=True``.
    """
    if not format_of(settings).can_stay and not dequantize:
        raise ValueError(
            f"the weights of the checkpoint are stacked experts, quantised as {format_name(settings)}, which stay so "
            "only on one process with transformers: pass dequantize=True, and each rank dequantises its shards to "
            "plain weights"
        )


def check_not_quantized(directory: Any, names: Iterable[str], known: Collection[str]) -> None:
    """Raise ``ValueError`` if tensors of a checkpoint belong to quantised weights.

    Args:
        directory: the directory of the checkpoint.
        names: the names of its tensors.
        known: tensor names of the model. They never count as quantised.
    """
    markers = tuple(f"{kind.separator}{each}" for kind in FORMATS.values() for each in kind.markers)
    found = next((name for name in names if name.endswith(markers) and name not in known), None)
    if found is not None:
        raise ValueError(
            f"{directory} holds quantised weights ({found}), which are read by from_pretrained_with_parallel only (as "
            "plain weights with dequantize=True), and only with quantization_config in config.json"
        )
