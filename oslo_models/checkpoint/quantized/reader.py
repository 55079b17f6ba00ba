"""Reads a quantised checkpoint as plain weights. Each rank dequantises only its local shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.filenames import CheckpointError
from oslo_models.checkpoint.quantized.formats import format_of
from oslo_models.checkpoint.quantized.weight import QuantizedWeight
from oslo_models.checkpoint.reader import CheckpointReader, StoredTensor
from oslo_models.sharding.layout import Index, Layout

_CHUNK = 1 << 22
"""Elements per dequantisation step. Bounds the memory of intermediate results."""


@dataclass(frozen=True)
class DequantizingReader(CheckpointReader):
    """Checkpoint that returns quantised weights as plain weights, under their names in the model.

    Attributes:
        weights: the quantised weights, by their names in the model.
        transposed: the names of weights that layers store as ``[in, out]`` (``Conv1D``).
    """

    weights: dict[str, QuantizedWeight] = field(default_factory=dict)
    transposed: frozenset[str] = frozenset()

    def copy_region(self, name: str, wanted: Index, out: Tensor, shape: tuple[int, ...] | None = None) -> None:
        if name not in self.weights:
            super().copy_region(name, wanted, out, shape)
            return
        *experts, rows, columns = wanted
        if not experts:
            self._read_matrix(name, (rows, columns), out, ())
        for number, expert in enumerate(range(experts[0].start, experts[0].stop) if experts else ()):
            self._read_matrix(name, (rows, columns), out[number], (expert,))

    def _read_matrix(self, name: str, wanted: tuple[slice, ...], out: Tensor, expert: tuple[int, ...]) -> None:
        """Read a region of a weight, or of one expert's weight, a few rows at a time."""
        target = out.T if name in self.transposed else out
        rows, columns = wanted[::-1] if name in self.transposed else wanted
        if not target.numel():
            return
        step = max(1, _CHUNK // max(1, columns.stop - columns.start))
        for chunk, start in zip(target.split(step), range(rows.start, rows.stop, step), strict=True):
            stop = min(start + step, rows.stop)
            chunk.copy_(self.weights[name].read((start, stop), (columns.start, columns.stop), *expert))


def dequantizing_reader(
    reader: CheckpointReader,
    settings: Mapping[str, Any],
    dtype: torch.dtype | None,
    is_transposed: Callable[[str], bool],
) -> DequantizingReader:
    """Return a reader that gives the weights of a quantised checkpoint as plain weights.

    Args:
        reader: the checkpoint.
        settings: its ``quantization_config``.
        dtype: the dtype of the dequantised weights. Defaults to the dtype of the unquantised weights.
        is_transposed: returns whether the layer stores the weight of this name as ``[in, out]``.

    Raises:
        CheckpointError: tensors of a quantised weight are missing.
        ImportError: a library that the format needs is not installed.
    """
    kind = format_of(settings)
    weights = {}
    plain = dict(reader.tensors)
    for module, parts in _layers(reader, kind).items():
        for name in parts.values():
            del plain[name]
        try:
            weights[f"{module}{kind.plain_suffix}"] = kind(reader, parts, settings)
        except KeyError as error:
            raise CheckpointError(
                f"{module} in {reader.directory} has no tensor {error} beside {', '.join(sorted(parts))}; copy or save "
                "the checkpoint again"
            ) from error
    floating = (info.dtype for info in plain.values() if info.dtype.is_floating_point)
    dtype = dtype or next(floating, torch.get_default_dtype())
    transposed = frozenset(name for name in weights if kind.is_transposed or is_transposed(name))
    for name, weight in weights.items():
        *stacked, rows, columns = weight.shape
        shape = (*stacked, columns, rows) if name in transposed else (*stacked, rows, columns)
        plain[name] = StoredTensor(Layout(shape), dtype, ())
    return DequantizingReader(
        reader.directory, reader.files, reader.grid, reader.manifest, plain, weights=weights, transposed=transposed
    )


def _layers(reader: CheckpointReader, kind: type[QuantizedWeight]) -> dict[str, dict[str, str]]:
    """Return the tensor names of each quantised layer: layer path to suffix to name."""
    layers: dict[str, dict[str, str]] = {}
    for name in reader.tensors:
        suffix = max((each for each in kind.suffixes if name.endswith(kind.separator + each)), key=len, default=None)
        if suffix is not None:
            layers.setdefault(name.removesuffix(kind.separator + suffix), {})[suffix] = name
    return {module: parts for module, parts in layers.items() if parts.keys() & set(kind.markers)}
