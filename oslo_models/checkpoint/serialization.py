"""Writes weights files tensor by tensor, so that not more than one has to be in memory."""

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

from oslo_models.checkpoint.weights_file import WeightsFile

SaveFunction = Callable[[Any, Any], Any]
"""``(object, path)``, as `torch.save`."""


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """What safetensors calls a type of torch: ``"F32"``."""
    name: str = json.loads(save({"x": torch.empty(0, dtype=dtype)})[8:])["x"]["dtype"]
    return name


@contextmanager
def reporting(path: Path, needed: int, rank: int) -> Iterator[None]:
    """Turn what the writing of ``path`` raises into an ``OSError`` that says who, where, how much and what was free.

    `torch.save` reports a full disk as a ``RuntimeError`` about unexpected positions.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
        number = getattr(error, "errno", None) or (errno.ENOSPC if free < needed else errno.EIO)
        text = f"rank {rank} could not write {path}: {needed} bytes are needed, {free} are free: {error}"
        raise OSError(number, f"{os.strerror(number)}: {text}") from error


def stream_order(infos: Mapping[str, Tensor]) -> list[str]:
    """The order in which a file takes its tensors: the widest types first, so that all are aligned in it."""
    return sorted(infos, key=lambda name: (-infos[name].itemsize, name))


def write_safetensors(path: Path, infos: Mapping[str, Tensor], tensors: Iterator[Tensor]) -> None:
    """Write a ``.safetensors`` file: a header that says where each tensor lies, then their bytes.

    Args:
        infos: tensors of the shapes and types to come, such as on the meta device.
        tensors: the tensors in `stream_order`; no more than one is kept.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in stream_order(infos):
        info, lies = infos[name], (offset, offset + infos[name].nbytes)
        header[name] = {"dtype": dtype_name(info.dtype), "shape": info.shape, "data_offsets": lies}
        offset = lies[1]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in infos:
            file.write(_bytes(next(tensors)))


def write_weights(
    path: Path,
    infos: Mapping[str, Tensor],
    tensors: Iterator[Tensor],
    aliases: Mapping[str, str],
    save_function: SaveFunction | None,
    spooled: bool,
) -> None:
    """Write a ``.safetensors`` file or, by `torch.save` or what takes its place, a dictionary.

    Args:
        infos: as in `write_safetensors`; likewise ``tensors``.
        aliases: names under which tensors appear once more, sharing memory (``.bin`` only): ``{alias: name}``.
        spooled: the tensors do not fit into memory together: they wait in a file and are mapped from it.
    """
    if path.suffix == ".safetensors":
        write_safetensors(path, infos, tensors)
        return
    if not spooled:
        state = {name: _trimmed(tensor) for name, tensor in zip(stream_order(infos), tensors, strict=True)}
        (save_function or torch.save)({**state, **{alias: state[name] for alias, name in aliases.items()}}, path)
        return
    spool = path.with_name(f".{path.name}.safetensors")
    write_safetensors(spool, infos, tensors)
    source = WeightsFile(spool)
    state = {**source.views, **{alias: source.views[name] for alias, name in aliases.items()}}
    if save_function is None:
        with _ForgetfulFile(path, source) as file:
            torch.save(state, file)
    else:
        save_function(state, path)
    spool.unlink()


class _ForgetfulFile(io.BufferedWriter):
    """A file that, after each write, gives back the pages of another one that were touched for it."""

    def __init__(self, path: Path, source: WeightsFile) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._source = source

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._source.give_back()
        return count


def _trimmed(tensor: Tensor) -> Tensor:
    """The tensor with no more memory than its own: torch.save writes whole storages."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
