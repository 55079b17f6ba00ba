"""Sample index: the order of documents and samples, as memory-mapped arrays shared by processes.

The order is identical to OSLO 1 and Megatron-LM.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 17
"""Documents per processing step."""
CHECKSUMS = "checksums.json"


class SampleOrder(NamedTuple):
    """Samples of a split.

    Attributes:
        documents: [documents] the document numbers in order of concatenation.
        bounds: [samples + 1, 2] the start of each sample: the position in ``documents`` and the token in this document.
            The last row is the end of the last sample.
        shuffle: [samples] the order of the samples.
    """

    documents: NDArray[Any]
    bounds: NDArray[Any]
    shuffle: NDArray[Any]


class DatasetSplit(NamedTuple):
    """Inputs of an order: documents ``start`` to ``stop``, a sample every ``stride`` tokens, and the seed."""

    start: int
    stop: int
    stride: int
    seed: int

    def key(self, lengths: NDArray[Any]) -> str:
        """Return a fingerprint of all inputs of the order."""
        digest = hashlib.blake2b(json.dumps(["order 1", *self]).encode(), digest_size=12)
        for part in _chunks(lengths, self.start, self.stop):
            digest.update(part.astype("<i8").tobytes())
        return digest.hexdigest()


def open_order(folder: Path, name: str, split: DatasetSplit, lengths: NDArray[Any]) -> SampleOrder:
    """Read an order. Build it first if it does not exist.

    Args:
        folder: the directory of the orders.
        name: a readable prefix of the file name.
        lengths: [documents of the dataset] the number of tokens of each document.

    Raises:
        ValueError: the documents have too few tokens for a sample, the folder cannot be written, or the stored order is
            damaged.
    """
    path = folder / f"{name}_{split.key(lengths)}"
    if not path.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder):
                if not path.exists():
                    _build(folder, path, split, lengths)
        except (PermissionError, OSError) as error:
            if path.exists():
                return _read(path, split, lengths)
            raise ValueError(f"the index of samples cannot be written to {folder} ({error}); pass cache_dir") from error
    return _read(path, split, lengths)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process build while the others wait. Without file locks all processes build, and one result is kept."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read(path: Path, split: DatasetSplit, lengths: NDArray[Any]) -> SampleOrder:
    """Map a stored order. Raise ``ValueError`` if its files are incomplete or damaged."""
    samples = _samples(split, lengths)
    shapes = {"documents": (split.stop - split.start,), "bounds": (samples + 1, 2), "shuffle": (samples,)}
    arrays = []
    try:
        sums = path / CHECKSUMS
        expected = json.loads(sums.read_bytes()) if sums.exists() else {}  # earlier releases wrote none
        for field, shape in shapes.items():
            file = path / f"{field}.npy"
            if expected and _checksum(file) != expected[field]:
                raise ValueError(f"{file.name} has another checksum")
            arrays.append(np.load(file, mmap_mode="r").view(np.ndarray))
            if arrays[-1].shape != shape or arrays[-1].dtype.kind not in "iu":
                raise ValueError(f"{file.name} holds {arrays[-1].shape} {arrays[-1].dtype}, not {shape} integers")
    except Exception as error:  # numpy raises many kinds of errors for a damaged header
        raise ValueError(f"{path} is damaged ({error}); delete this folder, and it is built again") from error
    return SampleOrder(*arrays)


def _checksum(file: Path) -> int:
    """Return the checksum of a file, in constant memory."""
    found = 0
    with file.open("rb") as opened:
        while part := opened.read(1 << 20):
            found = zlib.crc32(part, found)
    return found


def _build(folder: Path, path: Path, split: DatasetSplit, lengths: NDArray[Any]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=folder))
    try:
        scratch.chmod(0o777 & ~_umask(folder))
        build(scratch, split, lengths)
        try:
            scratch.rename(path)
        except OSError:
            if not path.exists():  # otherwise another process has built the same order
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _umask(folder: Path) -> int:
    """Return the permissions to mask in a new folder, from its parent. mkdtemp gives none to other users."""
    return ~folder.stat().st_mode & 0o777


def build(folder: Path, split: DatasetSplit, lengths: NDArray[Any]) -> None:
    """Write an order. Only the arrays of documents and of the shuffling are in memory."""
    samples = _samples(split, lengths)
    rng = np.random.RandomState(split.seed)
    small = len(lengths) <= np.iinfo(np.int32).max
    documents = np.arange(split.start, split.stop, dtype=np.int32 if small else np.int64)
    rng.shuffle(documents)
    np.save(folder / "documents.npy", documents)
    _write_bounds(folder / "bounds.npy", documents, lengths, split.stride, samples)
    del documents
    shuffle = np.arange(samples, dtype=np.uint32 if samples < np.iinfo(np.uint32).max - 1 else np.int64)
    rng.shuffle(shuffle)
    np.save(folder / "shuffle.npy", shuffle)
    sums = {field: _checksum(folder / f"{field}.npy") for field in SampleOrder._fields}
    (folder / CHECKSUMS).write_text(json.dumps(sums))


def _samples(split: DatasetSplit, lengths: NDArray[Any]) -> int:
    """Return the number of samples of a split. Raise ``ValueError`` if there is none."""
    tokens = sum(int(part.sum(dtype=np.int64)) for part in _chunks(lengths, split.start, split.stop))
    samples = (tokens - 1) // split.stride
    if samples < 1:
        raise ValueError(
            f"documents {split.start} to {split.stop} have {tokens} tokens, less than one sample of "
            f"{split.stride + 1}; use a smaller max_seq_length or a wider range"
        )
    return samples


def _write_bounds(path: Path, documents: NDArray[Any], lengths: NDArray[Any], stride: int, samples: int) -> None:
    """Write the position of the first token of each sample: token ``k * stride`` of the concatenated documents."""
    dtype = documents.dtype
    with path.open("wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (samples + 1, 2)}
        np.lib.format.write_array_header_1_0(file, header)
        before = 0
        for start in range(0, len(documents), CHUNK):
            ends = before + np.cumsum(lengths[documents[start : start + CHUNK]], dtype=np.int64)
            first, last = -(-before // stride), min((int(ends[-1]) - 1) // stride, samples)
            tokens = np.arange(first, last + 1, dtype=np.int64) * stride
            which = np.searchsorted(ends, tokens, side="right")
            bounds = np.empty((len(tokens), 2), dtype)
            bounds[:, 0] = start + which
            bounds[:, 1] = tokens - np.where(which > 0, ends[which - 1], before)
            bounds.tofile(file)
            before = int(ends[-1])


def _chunks(lengths: NDArray[Any], start: int, stop: int) -> Iterator[NDArray[Any]]:
    for begin in range(start, stop, CHUNK):
        yield lengths[begin : min(begin + CHUNK, stop)]
