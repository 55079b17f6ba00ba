"""Writes weights files one tensor at a time, so that only one tensor has to be in memory."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from oslo_models.checkpoint.checksum import tensor_bytes
from oslo_models.checkpoint.weights_file import WeightsFile

SaveFunction = Callable[[Any, Any], Any]
"""``(object, path)``, like `torch.save`."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors: ``"F32"``."""
    name: str = json.loads(save({"x": torch.empty(0, dtype=dtype)})[8:])["x"]["dtype"]
    return name


@contextmanager
def explain_write_errors(path: Path, nbytes: int, rank: int) -> Iterator[None]:
    """Re-raise errors of the block as an ``OSError`` with the rank, the path, its size and the free space.

    `torch.save` reports a full disk as a ``RuntimeError`` about an unexpected position.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        number = getattr(error, "errno", None) or (errno.ENOSPC if free < nbytes else errno.EIO)
        text = (
            f"rank {rank} could not write {os.path.realpath(path)}: {nbytes} bytes are needed, {free} are free: {error}"
        )
        raise OSError(number, f"{os.strerror(number)}: {text}") from error


@cache
def dtype_order(dtypes: frozenset[torch.dtype]) -> dict[torch.dtype, int]:
    """Return safetensors' order of dtypes in a file: wide dtypes first, and int64 before float64."""
    header = json.loads(save({str(dtype): torch.empty(0, dtype=dtype) for dtype in dtypes})[8:])
    names = [name for name in header if name != "__metadata__"]
    return {dtype: names.index(str(dtype)) for dtype in dtypes}


def write_order(meta: Mapping[str, Tensor]) -> list[str]:
    """Return the order of the tensors in a file: widest dtypes first, so that all are aligned."""
    order = dtype_order(frozenset(tensor.dtype for tensor in meta.values()))
    return sorted(meta, key=lambda name: (order[meta[name].dtype], name))


def write_safetensors(path: Path, meta: Mapping[str, Tensor], tensors: Iterator[Tensor]) -> None:
    """Write a ``.safetensors`` file: a header with the offset of each tensor, then the bytes of all tensors.

    The library's ``save_file`` needs all tensors in memory.

    Args:
        path: the file to write.
        meta: tensors of the same shapes and dtypes, for example on the meta device.
        tensors: the tensors in `write_order`. Only one is in memory at a time.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in write_order(meta):
        info, offsets = meta[name], (offset, offset + meta[name].nbytes)
        header[name] = {"dtype": dtype_name(info.dtype), "shape": info.shape, "data_offsets": offsets}
        offset = offsets[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in meta:
            file.write(tensor_bytes(next(tensors)))


def write_weights(
    path: Path,
    meta: Mapping[str, Tensor],
    tensors: Iterator[Tensor],
    aliases: Mapping[str, str],
    save_function: SaveFunction | None,
    use_spool_file: bool,
) -> None:
    """Write a ``.safetensors`` file, or a ``.bin`` file with a dictionary of tensors.

    Args:
        path: the file to write. Its suffix selects the format.
        meta: see `write_safetensors`.
        tensors: see `write_safetensors`.
        aliases: additional tensor names that share memory (``.bin`` only): ``{alias: name}``.
        save_function: replaces `torch.save` (``.bin`` only).
        use_spool_file: write the tensors to a temporary file first and map it into memory, since `torch.save` needs all
            tensors at once.
    """
    if path.suffix == ".safetensors":
        write_safetensors(path, meta, tensors)
        return
    if not use_spool_file:
        state = {name: _compact(tensor) for name, tensor in zip(write_order(meta), tensors, strict=True)}
        (save_function or torch.save)({**state, **{alias: state[name] for alias, name in aliases.items()}}, path)
        return
    spool_file = path.with_name(f".{path.name}.safetensors")
    write_safetensors(spool_file, meta, tensors)
    source = WeightsFile(spool_file)
    state = {**source.views, **{alias: source.views[name] for alias, name in aliases.items()}}
    if save_function is None:
        with _PageReleasingFile(path, source) as file:
            torch.save(state, file)
    else:
        save_function(state, path)
    spool_file.unlink()


class _PageReleasingFile(io.BufferedWriter):
    """File that releases the pages of the mapped source file after each write."""

    def __init__(self, path: Path, source: WeightsFile) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._source = source

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._source.release_pages()
        return count


def _compact(tensor: Tensor) -> Tensor:
    """Copy the tensor if it is a view of a larger storage, since torch.save would write the full storage."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
