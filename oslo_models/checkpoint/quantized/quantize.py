"""Quantises the weights of a plain checkpoint with bitsandbytes while reading. Equals bitsandbytes on one process."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.quantized.bitsandbytes import Bnb4BitWeight, Bnb8BitWeight
from oslo_models.checkpoint.quantized.packed import HeldTensors
from oslo_models.checkpoint.quantized.weight import QuantizedWeight
from oslo_models.checkpoint.reader import CheckpointReader
from oslo_models.sharding.layout import Layout

_BLOCK, _NESTED_BLOCK = 64, 256
"""Block sizes of bitsandbytes: elements per weight block, scales per block of scales."""
_CHUNK = 1 << 22
"""Elements of the plain weight in memory at a time."""


def quantize(
    reader: CheckpointReader, name: str, is_transposed: bool, config: Any, dtype: torch.dtype
) -> QuantizedWeight:
    """Quantise a full weight. Rows are read in chunks to bound memory.

    Args:
        reader: the checkpoint.
        name: the name of the plain weight in it.
        is_transposed: the checkpoint stores the weight as ``[in, out]``.
        config: a ``BitsAndBytesConfig``.
        dtype: the dtype to which the plain weight is cast before quantisation.
    """
    chunks = (chunk.to(dtype) for chunk in _rows(reader, name, is_transposed))
    kind, make = (Bnb4BitWeight, _in_4bit) if config.load_in_4bit else (Bnb8BitWeight, _in_8bit)
    shape = reader.tensors[name].shape
    parts = make(chunks, shape[::-1] if is_transposed else shape, config)
    return kind(HeldTensors.of(parts), {suffix: suffix for suffix in parts}, {})  # type: ignore[arg-type]


def _rows(reader: CheckpointReader, name: str, is_transposed: bool) -> Iterator[Tensor]:
    """Yield the rows of a weight in order, in chunks of whole quantisation blocks."""
    shape, dim = reader.tensors[name].shape, int(is_transposed)
    rows, columns = shape[dim], shape[1 - dim]
    unit = _BLOCK // math.gcd(_BLOCK, columns)
    step = max(_CHUNK // columns // unit, 1) * unit
    ranges = tuple(((start, min(start + step, rows)),) for start in range(0, rows, step))
    for number in range(len(ranges)):
        chunk = reader.read(name, Layout(shape, dim, ranges), number)
        yield chunk.T.contiguous() if is_transposed else chunk


def _in_4bit(chunks: Iterator[Tensor], shape: tuple[int, ...], config: Any) -> dict[str, Tensor]:
    from bitsandbytes.functional import QuantState, quantize_4bit, quantize_blockwise

    kind, storage = config.bnb_4bit_quant_type, config.bnb_4bit_quant_storage
    made = [quantize_4bit(chunk, blocksize=_BLOCK, quant_type=kind, quant_storage=storage) for chunk in chunks]
    absmax = torch.cat([state.absmax for _, state in made])
    offset = nested = None
    if config.bnb_4bit_use_double_quant:
        offset = absmax.mean()
        absmax, nested = quantize_blockwise(absmax - offset, blocksize=_NESTED_BLOCK)
    first = made[0][1]
    state = QuantState(
        absmax=absmax,
        shape=torch.Size(shape),
        dtype=first.dtype,
        blocksize=_BLOCK,
        code=first.code,
        quant_type=kind,
        offset=offset,
        state2=nested,
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    return {"weight": torch.cat([packed for packed, _ in made]), **parts}


def _in_8bit(chunks: Iterator[Tensor], shape: tuple[int, ...], config: Any) -> dict[str, Tensor]:
    from bitsandbytes.functional import int8_vectorwise_quant

    made = [int8_vectorwise_quant(chunk.half()) for chunk in chunks]
    return {"weight": torch.cat([each[0] for each in made]), "SCB": torch.cat([each[1] for each in made])}
