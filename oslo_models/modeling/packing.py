"""Selects weights that stay quantised in their layers (`PackedWeight`), and makes readers for them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizers_utils import should_convert_module

from oslo_models.checkpoint import CheckpointReader
from oslo_models.checkpoint.quantized import DequantizingReader, PackedWeight, PackingReader, quantize
from oslo_models.modeling.weight_mapping import WeightMapping
from oslo_models.sharding.model_protocol import TransformersModel


def check_combination(settings: Mapping[str, Any] | None, on_the_fly: Any, dequantize: bool) -> None:
    """Raise ``ValueError`` if weights that stay quantised would be quantised again."""
    if settings is not None and on_the_fly is not None and not dequantize:
        raise ValueError(
            "the weights of the checkpoint are already quantised: leave out quantization_config, or pass "
            "dequantize=True to quantise them again in its way"
        )


def packing_reader(
    reader: DequantizingReader, mapping: WeightMapping, key_mapping: Any, settings: Mapping[str, Any]
) -> PackingReader:
    """Return a reader that keeps the weights of a quantised checkpoint quantised.

    Args:
        reader: the quantised checkpoint.
        key_mapping: as in transformers' ``from_pretrained``.
        settings: the checkpoint's ``quantization_config``.

    Raises:
        ValueError: a quantised weight does not belong to a linear layer.
    """
    linear = _linear_layers(mapping, reader.weights, key_mapping)
    if others := [name for name in reader.weights if name not in linear]:
        raise ValueError(
            f"{others[0]} in {reader.directory} is quantised but is not the weight of a linear layer (the model stacks "
            "the weights of experts), so it cannot stay quantised: pass dequantize=True to load plain weights"
        )
    computed = str(settings.get("bnb_4bit_compute_dtype") or "").removeprefix("torch.")
    compute_dtype = getattr(torch, computed) if computed else None
    names = frozenset(reader.weights)
    return _packing_reader(reader, names, reader.weights.__getitem__, reader.transposed, compute_dtype)


def quantizing_reader(
    reader: CheckpointReader,
    mapping: WeightMapping,
    key_mapping: Any,
    config: Any,
    skipped: Collection[str],
    dtype: torch.dtype | None,
) -> PackingReader:
    """Return a reader that quantises the weights of linear layers with bitsandbytes while reading.

    Args:
        reader: the checkpoint, with plain weights.
        key_mapping: as in transformers' ``from_pretrained``.
        config: a ``BitsAndBytesConfig``.
        skipped: names of modules that are not quantised.
        dtype: the model's dtype. By default, each weight keeps its dtype.
    """
    linear = _linear_layers(mapping, reader.tensors, key_mapping)
    names = frozenset(name for name, module in linear.items() if should_convert_module(module, skipped))
    transposed = frozenset(name for name in names if isinstance(mapping.model.get_submodule(linear[name]), Conv1D))

    def quantized(name: str) -> Any:
        return quantize(reader, name, name in transposed, config, dtype or reader.tensors[name].dtype)

    compute_dtype = config.bnb_4bit_compute_dtype if config.load_in_4bit else None
    return _packing_reader(reader, names, quantized, transposed, compute_dtype)


def freeze_packed(model: TransformersModel) -> None:
    """Freeze quantised weights. Set the flag by which transformers and ``peft`` recognise bitsandbytes models."""
    packed = [param for param in model.parameters() if isinstance(param, PackedWeight)]
    for param in packed:
        param.requires_grad_(False)
    if packed:
        bits = {"Bnb4BitWeight": 4, "Bnb8BitWeight": 8}.get(type(packed[0].packing.weight).__name__)
        if bits is not None:
            setattr(model, f"is_loaded_in_{bits}bit", True)


def _packing_reader(
    inner: CheckpointReader, names: frozenset[str], quantized: Any, transposed: frozenset[str], compute_dtype: Any
) -> PackingReader:
    make = partial(PackingReader, inner.directory, inner.files, inner.grid, inner.manifest, inner.tensors)
    return make(inner=inner, packed=names, quantized=quantized, transposed=transposed, compute_dtype=compute_dtype)


def _linear_layers(mapping: WeightMapping, sources: Collection[str], key_mapping: Any) -> dict[str, str]:
    """Map the checkpoint names of linear layers' weights to the names of the layers."""
    found = {}
    for source, target in mapping.target_names(sources, key_mapping):
        module, _, leaf = target.rpartition(".")
        is_known = leaf == "weight" and target in mapping.state
        if is_known and type(mapping.model.get_submodule(module)) in (nn.Linear, Conv1D):
            found[source] = module
    return found
