"""Readers of documents: text files, JSON lines (also with gzip or zstandard), parquet, and Hugging Face datasets."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

ON_ERROR = ("stop", "skip")
SKIPPING = "on_error='skip'"
COMPRESSED = (".gz", ".zst")
ROWS = 256
"""Rows of a table per read."""


def open_documents(file: str | os.PathLike[str], text_key: str = "text", on_error: str = "stop") -> Iterator[str]:
    """Yield the texts of a ``.txt`` (one per line, including the line break), ``.jsonl`` or ``.parquet`` file.

    ``.gz`` and ``.zst`` may follow the ending of a text or JSON file.

    Args:
        file: the path.
        text_key: the key or column of the text.
        on_error: for a line or row without a readable text, ``stop`` raises, ``skip`` warns and continues. A damaged or
            truncated file raises in both cases.

    Raises:
        ValueError: the ending is unknown, or a line, row or file cannot be read.
    """
    _check(on_error)
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    endings = [ending for ending in path.suffixes if ending not in COMPRESSED]
    kind = endings[-1] if endings else ""
    if kind == ".txt":
        return _texts(path, "line", _text_lines(path), _decoded, on_error)
    if kind in (".jsonl", ".json"):
        return open_jsonl(path, text_key, on_error)
    if kind == ".parquet":
        return _texts(path, "row", _rows(path, text_key), partial(_text_of_key, text_key), on_error)
    raise ValueError(f"{path}: the ending is not .txt, .jsonl or .parquet (.gz and .zst may follow)")


def open_jsonl(file: str | os.PathLike[str], json_key: str, on_error: str = "stop") -> Iterator[str]:
    """Yield the texts of a file with one JSON object per line. If ``file`` does not exist, append ``.jsonl``."""
    _check(on_error)
    path = Path(file)
    if not path.is_file() and not str(file).endswith(".jsonl"):
        path = Path(f"{os.fspath(file)}.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    lines = ((number, line) for number, line in enumerate(_lines(path), start=1) if line.strip())
    return _texts(path, "line", lines, partial(_json_text, json_key), on_error)


def _check(on_error: str) -> None:
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} is not one of {', '.join(ON_ERROR)}")


def _texts(
    path: Path, name: str, records: Iterable[tuple[int, Any]], read: Callable[[Any], str], on_error: str
) -> Iterator[str]:
    """Yield the texts of numbered records. ``read`` raises ``ValueError`` for a record without text."""
    for number, record in records:
        try:
            text = read(record)
        except ValueError as error:
            message = f"{path}, {name} {number}: {error}"
            if on_error == "stop":
                raise ValueError(f"{message}; {SKIPPING} skips such {name}s") from None
            warnings.warn(f"skipped: {message}", stacklevel=2)
        else:
            yield text


def _json_text(key: str, line: bytes) -> str:
    try:
        found = json.loads(_decoded(line.removeprefix(codecs.BOM_UTF8)))
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(found, dict) or key not in found:
        there = f"its keys are {', '.join(map(repr, found))}" if isinstance(found, dict) else "it is no object"
        raise ValueError(f"no key {key!r}: {there}")
    return _text_of_key(key, found[key])


def _text_of_key(key: str, value: Any) -> str:
    if isinstance(value, UnicodeDecodeError):
        raise value
    if not isinstance(value, str):
        raise ValueError(f"the value of {key!r} is {type(value).__name__} instead of a text")
    return value


def _decoded(line: bytes) -> str:
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None


def _text_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the numbered lines of a text with Unix line breaks."""
    number = 0
    for line in _lines(path):
        if b"\r" not in line:
            number += 1
            yield number, line
            continue
        for part in line.replace(b"\r\n", b"\n").replace(b"\r", b"\n").splitlines(keepends=True):
            number += 1
            yield number, part


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, without a byte order mark.

    Raises:
        ValueError: the file is damaged, truncated or in another encoding.
    """
    read = 0
    try:
        with _open(path) as file:
            for line in file:
                if not read:
                    line = _without_mark(line)
                    if not line:  # the file is a mark alone
                        continue
                read += 1
                yield line
    except (EOFError, OSError, zlib.error, CompressionError) as error:
        raise ValueError(
            f"{path}, after line {read}: the file is damaged or cut off ({error}); get a complete copy of it"
        ) from error
    except UnicodeError as error:
        raise ValueError(f"{path}: {error}") from None


def _without_mark(line: bytes) -> bytes:
    for mark in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE):
        if line.startswith(mark):
            raise UnicodeError("it begins with the byte order mark of UTF-16 or UTF-32; convert it to UTF-8")
    return line.removeprefix(codecs.BOM_UTF8)


def _open(path: Path) -> Any:
    if path.suffix not in COMPRESSED:
        return path.open("rb")
    if not path.stat().st_size:
        raise EOFError("it is empty, but a compressed file is not")
    return gzip.open(path) if path.suffix == ".gz" else io.BufferedReader(_ZstdFile(path))


class _ZstdFile(io.RawIOBase):
    """Reads all frames of a file. zstandard's readers would accept an incomplete frame without an error.

    Raises:
        CompressionError: the file is damaged or truncated.
        ValueError: zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{path}: reading .zst needs zstandard; pip install 'oslo-models[data]'") from None
        self._error, self._decompressor = zstandard.ZstdError, zstandard.ZstdDecompressor()
        self._file = path.open("rb")
        self._frame: Any = None
        self._left, self._made = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._made:
            self._left = self._left or self._file.read(1 << 16)
            if not self._left:
                if self._frame is not None:
                    raise CompressionError("it ends in the middle of a zstandard frame")
                return 0
            self._made = memoryview(self._decompress())
        count = min(len(buffer), len(self._made))
        buffer[:count], self._made = self._made[:count], self._made[count:]
        return count

    def _decompress(self) -> bytes:
        """Decompress up to the end of the frame."""
        self._frame = self._frame or self._decompressor.decompressobj()
        try:
            made: bytes = self._frame.decompress(self._left)
        except self._error as error:
            raise CompressionError(str(error)) from None
        self._left = b""
        if self._frame.eof:
            self._left, self._frame = self._frame.unused_data, None
        return made


class CompressionError(Exception):
    """A compressed file is damaged or truncated."""


def _rows(path: Path, key: str) -> Iterator[tuple[int, Any]]:
    """Yield the numbered values of a column, with an error in place of values that are not UTF-8.

    Raises:
        ValueError: the file is damaged or truncated, or has no such column of texts.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow; pip install 'oslo-models[data]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path, memory_map=True, page_checksum_verification=True) as file:
            _check_column(path, key, file.schema_arrow)
            for batch in file.iter_batches(ROWS, columns=[key]):
                for value in _values(batch.column(0)):
                    number += 1
                    yield number, value
            expected = file.metadata.num_rows
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(
            f"{path}, after row {number}: the file is damaged or cut off ({error}); get a complete copy of it"
        ) from error
    if number != expected:
        raise ValueError(f"{path}: {number} of its {expected} rows can be read; get a complete copy of it")


def _check_column(path: Path, key: str, schema: Any) -> None:
    if schema.names.count(key) != 1:
        number = "no column" if key not in schema.names else "several columns"
        raise ValueError(f"{path}: {number} {key!r}; there are {', '.join(schema.names)}")
    kind = schema.field(key).type
    if str(kind.value_type if hasattr(kind, "index_type") else kind) not in (
        "string",
        "large_string",
        "string_view",
        "null",
    ):
        raise ValueError(f"{path}: the column {key!r} has the type {kind} instead of text; convert it to string")


def _values(column: Any) -> list[Any]:
    try:
        values: list[Any] = column.to_pylist()
    except UnicodeDecodeError:
        values = [_value(each) for each in column]
    return values


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        return error


def texts_of(iterable: Iterable[Any], key: str) -> Iterator[str]:
    """Yield the texts of an iterable of strings or of rows with a column ``key``, or of a Hugging Face dataset.

    Raises:
        ValueError: an item is not a text.
    """
    if hasattr(iterable, "select_columns") and hasattr(
        iterable, "iter"
    ):  # a Hugging Face dataset, in memory or streamed
        columns = getattr(iterable, "column_names", None)
        if columns is not None and key not in columns:
            raise ValueError(f"the dataset has no column {key!r}; there are {', '.join(columns)}")
        batches = iterable.select_columns(key).iter(batch_size=ROWS)
        iterable = chain.from_iterable(batch[key] for batch in batches)
    elif isinstance(iterable, str):
        raise ValueError(
            "preprocess needs an iterable of texts and got one text; for a file, pass open(name) or "
            "open_documents(name)"
        )
    for number, item in enumerate(iterable):
        text = item.get(key) if isinstance(item, dict) else item
        if not isinstance(text, str):
            of = f" of {key!r}" if isinstance(item, dict) else ""
            raise ValueError(f"document {number}{of} is {type(text).__name__} instead of a text")
        yield text
