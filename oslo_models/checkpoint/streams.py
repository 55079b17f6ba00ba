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
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oslo_models.checkpoint.weights import TensorInfo, WeightsFile

DTYPE_NAMES = {
    **{torch.bool: "BOOL", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64"},
    **{torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64", torch.complex64: "C64"},
    **{torch.uint8: "U8", torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64"},
    **{torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.float8_e8m0fnu: "F8_E8M0"},
}
"""What safetensors calls the types of torch."""
SaveFunction = Callable[[Any, Any], Any]
"""``(object, path)``, as `torch.save`."""


def stream_order(infos: Mapping[str, TensorInfo]) -> list[str]:
    """The order in which a stream takes its tensors: the widest types first, so that all are aligned in the file."""
    return sorted(infos, key=lambda name: (-infos[name].dtype.itemsize, name))


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


def open_stream(
    path: Path,
    infos: Mapping[str, TensorInfo],
    aliases: Mapping[str, str],
    save_function: SaveFunction | None,
    spool: bool,
) -> SafetensorsStream | TorchStream:
    """The stream that writes a file of this name.

    Args:
        aliases: names under which tensors appear once more, sharing memory (``.bin`` only): ``{alias: name}``.
        spool: the tensors do not fit into memory together.
    """
    if path.suffix == ".safetensors":
        return SafetensorsStream(path, infos)
    if spool:
        return SpooledTorchStream(path, infos, aliases, save_function or torch.save)
    return TorchStream(path, aliases, save_function or torch.save)


class SafetensorsStream:
    """Writes a ``.safetensors`` file: a header that says where each tensor lies, then their bytes."""

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in stream_order(infos):
            info = infos[name]
            lies = (offset, offset + info.nbytes)
            header[name] = {"dtype": DTYPE_NAMES[info.dtype], "shape": info.shape, "data_offsets": lies}
            offset = lies[1]
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file = open(path, "wb")  # noqa: SIM115  closed by finish()
        self._file.write(struct.pack("<Q", len(text)) + text)

    def add(self, name: str, tensor: Tensor) -> None:
        self._file.write(_bytes(tensor))

    def finish(self) -> None:
        self._file.close()


class TorchStream:
    """Writes a dictionary by `torch.save`, keeping the tensors that were added until then."""

    def __init__(self, path: Path, aliases: Mapping[str, str], save_function: SaveFunction) -> None:
        self._path, self._aliases, self._save = path, aliases, save_function
        self._state: dict[str, Tensor] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        whole = tensor.untyped_storage().nbytes() == tensor.nbytes
        self._state[name] = tensor if whole else tensor.clone()  # torch.save writes whole storages

    def finish(self) -> None:
        state = {**self._state, **{alias: self._state[name] for alias, name in self._aliases.items()}}
        self._save(state, self._path)


class SpooledTorchStream(SafetensorsStream):
    """Writes the same for tensors that do not fit into memory together: they wait in a file and are mapped from it."""

    def __init__(
        self, path: Path, infos: Mapping[str, TensorInfo], aliases: Mapping[str, str], save_function: SaveFunction
    ) -> None:
        self._path, self._aliases, self._save = path, aliases, save_function
        self._spool = path.with_name(f".{path.name}.safetensors")
        super().__init__(self._spool, infos)

    def finish(self) -> None:
        super().finish()
        spool = WeightsFile(self._spool)
        state = {**spool.views, **{alias: spool.views[name] for alias, name in self._aliases.items()}}
        if self._save is torch.save:
            with _ForgetfulFile(self._path, spool) as file:
                torch.save(state, file)
        else:
            self._save(state, self._path)
        del state
        spool.close()
        self._spool.unlink()


class _ForgetfulFile(io.BufferedWriter):
    """A file that, after each write, gives back the pages of another one that were touched for it."""

    def __init__(self, path: Path, source: WeightsFile) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._source = source

    def write(self, data: Any) -> int:
        count = super().write(data)
        self._source.give_back()
        return count


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
