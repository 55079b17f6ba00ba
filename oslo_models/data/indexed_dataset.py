"""Files of a binarised dataset: ``.bin`` (concatenated tokens) and ``.idx`` (the position of each sequence).

`IndexedDataset` reads both of Megatron's formats. `write_index` writes them.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Megatron's codes. Older versions of Megatron and OSLO wrote float64 as 7. The size of the .bin file disambiguates.
DTYPES = dict(enumerate(("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16"), start=1))
CODES = {name: code for code, name in DTYPES.items()}
IMPLS = ("mmap", "lazy", "cached")
MMAP_MAGIC, LEGACY_MAGIC = b"MMIDIDX\x00\x00", b"TNTIDX\x00\x00"
CHUNK = 1 << 18
"""Index entries per processing step."""


class Index(NamedTuple):
    """Content of an ``.idx`` file.

    Attributes:
        dtype: the dtype of the tokens.
        lengths: [sequences] the number of tokens of each sequence.
        starts: [sequences] the start of each sequence in the ``.bin`` file, in bytes or in tokens.
        starts_offset: the offset of ``starts`` in the file.
        unit: the bytes per unit of ``starts``.
        ends: (offset in the file, count) of the int64 array with the first sequence of each document.
    """

    dtype: np.dtype[Any]
    lengths: NDArray[Any]
    starts: NDArray[np.int64]
    starts_offset: int
    unit: int
    ends: tuple[int, int]


class IndexedDataset:
    """Token sequences of ``name.bin`` and ``name.idx``, in either format.

    Args:
        name: the path of the files without their endings.
        impl: the way to read tokens: ``mmap`` maps the file, ``lazy`` reads on each access, ``cached`` loads the file.

    Attributes:
        dtype: the dtype of the tokens.
        lengths: [sequences] the number of tokens of each sequence.
        stride: the increase of document positions per token (1, or the bytes of a token).

    Raises:
        ValueError: the files are not a dataset or do not belong together.
    """

    def __init__(self, name: str | os.PathLike[str], impl: str = "mmap") -> None:
        check_impl(impl)
        self.name, self.impl = os.fspath(name), impl
        index_path, data_path = self.name + ".idx", self.name + ".bin"
        index = _read_index(index_path)
        size = os.path.getsize(data_path)
        tokens = int(index.lengths[-1]) if len(index.lengths) else 0
        last = int(index.starts[-1]) if len(index.starts) else 0
        if index.dtype == np.float32 and 0 < size == last + tokens * 8 == 8 * int(index.lengths.sum(dtype=np.int64)):
            index = index._replace(dtype=np.dtype("<f8"))
        itemsize = index.dtype.itemsize
        end = last * index.unit + tokens * itemsize
        if size != end:
            raise ValueError(
                f"{data_path} has {size} bytes, but {index_path} expects {end}: it is damaged, cut short or belongs to "
                "another index; copy both files again, or preprocess the data again"
            )
        _check_documents(index_path, index, size)
        self.dtype, self.lengths = index.dtype, index.lengths
        self._starts, self.stride = index.starts, itemsize // index.unit
        self._ends = index.ends
        self._tokens: NDArray[Any] | None = None
        self._file: int | None = None
        if impl == "cached":
            self._tokens = np.fromfile(data_path, self.dtype)
        elif impl == "mmap":
            self._tokens = map_file(data_path, self.dtype)
        else:
            self._file = os.open(data_path, os.O_RDONLY)

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            os.close(self._file)  # type: ignore[arg-type]
            self._file = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.impl)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self.get(i) for i in range(*index.indices(len(self)))]
        return self.get(index)

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return the tokens of a sequence, or ``length`` tokens from ``offset`` on. The array is read-only."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} of a dataset of {len(self)} sequences")
        have = int(self.lengths[index])
        length = have - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > have:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {index}, which has {have}")
        return self.read(int(self._starts[index]) // self.stride + offset, length)

    def read(self, start: int, count: int) -> NDArray[Any]:
        """Return ``count`` tokens of the file, from token ``start`` on."""
        if self._tokens is not None:
            return self._tokens[start : start + count]
        assert self._file is not None
        itemsize = self.dtype.itemsize
        return np.frombuffer(os.pread(self._file, count * itemsize, start * itemsize), self.dtype)

    def documents(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the position of each document and its number of tokens.

        Position divided by ``stride`` is the first token in the file. The index defines the documents. If this part of
        the index is missing or incomplete (older versions of Megatron did not complete it when they merged files),
        every sequence is a document.
        """
        offset, count = self._ends
        path, sequences = self.name + ".idx", len(self.lengths)
        if count == 0 or int(np.fromfile(path, "<i8", 1, offset=offset + 8 * (count - 1))[0]) != sequences:
            return self._starts, self.lengths
        if count == sequences + 1 and all(
            np.array_equal(np.fromfile(path, "<i8", stop - start, offset=offset + 8 * start), np.arange(start, stop))
            for start, stop in _chunks(count)
        ):
            return self._starts, self.lengths
        bounds = np.fromfile(path, "<i8", count, offset=offset)
        if bounds[0] != 0 or (falls := np.flatnonzero(np.diff(bounds) < 0)).size:
            number = 0 if bounds[0] != 0 else int(falls[0])
            raise ValueError(f"{path}: document {number} ends before it begins; the index is damaged: copy it again")
        before = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[bounds]
        starts = np.append(self._starts, 0)[bounds[:-1]]
        return starts, np.diff(before)


def check_impl(impl: str) -> None:
    """Raise ``ValueError`` for an unknown ``binarization_impl``."""
    if impl not in IMPLS:
        raise ValueError(f"binarization_impl={impl!r} is not one of {', '.join(IMPLS)}")


def map_file(path: str | os.PathLike[str], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Map a file into memory as an array."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size // dtype.itemsize
        if not size:
            return np.empty(0, dtype)
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype, size)


def _read_index(path: str) -> Index:
    with open(path, "rb") as file:
        head = file.read(72)
        size = os.fstat(file.fileno()).st_size
    try:
        if head.startswith(MMAP_MAGIC):
            return _mmap_index(path, head, size)
        if head.startswith(LEGACY_MAGIC):
            return _legacy_index(path, head, size)
    except (struct.error, KeyError):
        pass
    raise ValueError(f"{path} is not the index of a dataset: it begins with {head[:34]!r}")


def _mmap_index(path: str, head: bytes, size: int) -> Index:
    version, code, sequences, ends = struct.unpack_from("<QBQQ", head, len(MMAP_MAGIC))
    start = 34
    _check(path, version, start + 12 * sequences + 8 * ends, size)
    content = map_file(path, np.dtype(np.uint8))
    begin, end = start + 4 * sequences, start + 12 * sequences
    lengths, starts = content[start:begin].view("<i4"), content[begin:end].view("<i8")
    return Index(np.dtype(DTYPES[code]).newbyteorder("<"), lengths, starts, begin, 1, (end, ends))


def _legacy_index(path: str, head: bytes, size: int) -> Index:
    version, code, itemsize, sequences, sizes, ends = struct.unpack_from("<6Q", head, len(LEGACY_MAGIC))
    start = 56
    _check(path, version, start + 8 * (2 * (sequences + 1) + sizes + ends), size)
    if sizes != sequences:
        raise ValueError(f"{path}: {sequences} items with {sizes} dimensions; only sequences of tokens can be read")
    content = map_file(path, np.dtype(np.int64).newbyteorder("<"))
    begin = start // 8 + sequences + 1  # skip the offsets of the dimensions: 0, 1, 2, ... for sequences
    name = {6: f"float{8 * itemsize}", 7: f"float{8 * itemsize}"}.get(code) or DTYPES[code]
    dtype = np.dtype(name).newbyteorder("<")
    if dtype.itemsize != itemsize:
        raise ValueError(f"{path}: tokens of dtype code {code} do not have {itemsize} bytes")
    starts = content[begin : begin + sequences]
    lengths = content[begin + sequences + 1 : begin + 2 * sequences + 1]
    return Index(dtype, lengths, starts, 8 * begin, itemsize, (8 * (begin + 2 * sequences + 1), ends))


def _check(path: str, version: int, expected: int, size: int) -> None:
    if version != 1:
        raise ValueError(f"{path}: version {version} of the format; only 1 can be read")
    if size < expected:
        raise ValueError(f"{path} has {size} of {expected} bytes: it was cut short; preprocess the data again")


def _check_documents(path: str, index: Index, size: int) -> None:
    """Raise ``ValueError`` unless each sequence follows the previous one and all lie within the token file.

    Check this before any use of the lengths: a damaged length could create a sample index of any size.

    Args:
        path: the path of the index.
        size: the size of the token file in bytes.
    """
    itemsize, expected = index.dtype.itemsize, 0
    for start, stop in _chunks(len(index.lengths)):
        lengths = index.lengths[start:stop].astype(np.int64)
        # read instead of mapped: mapped pages would stay in memory
        starts = np.fromfile(path, "<i8", stop - start, offset=index.starts_offset + 8 * start)
        ends = np.cumsum(lengths * (itemsize // index.unit), dtype=np.int64) + expected
        follows = starts == np.concatenate([[expected], ends[:-1]])
        within = lengths.min() >= 0 and lengths.max() <= size // itemsize and ends[-1] <= size // index.unit
        if not (within and follows.all()):
            wrong = (lengths < 0) | (lengths > size // itemsize) | (ends > size // index.unit) | ~follows
            number = int(wrong.argmax())
            raise ValueError(
                f"{path}: document {start + number} has {lengths[number]} tokens from position {starts[number]} on: it "
                f"does not follow the one before it, or leaves the file of {size} bytes. The index is damaged; copy "
                "it again, or preprocess the data again"
            )
        expected = int(ends[-1])


def write_index(
    path: str | os.PathLike[str],
    lengths: NDArray[Any],
    dtype: np.dtype[Any] | str,
    impl: str = "mmap",
    ends: NDArray[Any] | None = None,
) -> None:
    """Write the ``.idx`` file for contiguous sequences of a ``.bin`` file, in constant memory.

    Args:
        path: the file to write.
        lengths: [sequences] the number of tokens of each sequence.
        dtype: the dtype of the tokens.
        impl: ``mmap`` for Megatron's current format (MMIDIDX), ``lazy`` and ``cached`` for fairseq's format (TNTIDX).
        ends: [documents + 1] the first sequence of each document. By default every sequence is a document.
    """
    check_impl(impl)
    dtype = np.dtype(dtype)
    if dtype.name not in CODES:
        raise ValueError(f"dtype={dtype.name!r} is not one of {', '.join(CODES)}")
    count, code = len(lengths), CODES[dtype.name]
    ends_count = count + 1 if ends is None else len(ends)
    with open(path, "wb") as file:
        if impl == "mmap":
            file.write(MMAP_MAGIC + struct.pack("<QBQQ", 1, code, count, ends_count))
            for start, stop in _chunks(count):
                lengths[start:stop].astype("<i4").tofile(file)
            for offsets in _offsets(lengths):
                (offsets[:-1] * dtype.itemsize).tofile(file)
        else:
            # fairseq's code 7 is float64
            code = {"float32": 6, "float64": 7}.get(dtype.name, code)
            file.write(LEGACY_MAGIC + struct.pack("<6Q", 1, code, dtype.itemsize, count, count, ends_count))
            _write_range(file, count + 1)
            file.write(struct.pack("<q", 0))
            for offsets in _offsets(lengths):
                offsets[1:].tofile(file)
            for start, stop in _chunks(count):
                lengths[start:stop].astype("<i8").tofile(file)
        if ends is None:
            _write_range(file, ends_count)
        else:
            ends.astype("<i8").tofile(file)
        file.flush()
        os.fsync(file.fileno())


def _chunks(count: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + CHUNK, count)) for start in range(0, count, CHUNK))


def _offsets(lengths: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield the number of tokens before each sequence, in chunks that overlap by one element."""
    offset = 0
    for start, stop in _chunks(len(lengths)):
        offsets = np.empty(stop - start + 1, "<i8")
        offsets[0] = offset
        np.cumsum(lengths[start:stop], dtype=np.int64, out=offsets[1:])
        offsets[1:] += offset
        offset = int(offsets[-1])
        yield offsets


def _write_range(file: Any, count: int) -> None:
    for start, stop in _chunks(count):
        np.arange(start, stop, dtype="<i8").tofile(file)


def total(lengths: NDArray[Any]) -> int:
    """Return the sum of the lengths, in constant memory."""
    return sum(int(lengths[start:stop].sum(dtype=np.int64)) for start, stop in _chunks(len(lengths)))
