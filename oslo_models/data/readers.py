"""Readers of documents: text files, JSON lines (also with gzip or zstandard), parquet, and Hugging Face datasets."""

from __future__ import annotations

import gzip
import io
import json
import os
import warnings
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

ON_ERROR = ("stop", "skip")
COMPRESSED = (".gz", ".zst")
ROWS = 256
"""Rows of a table that are read at once."""


def open_documents(file: str | os.PathLike[str], text_key: str = "text", on_error: str = "stop") -> Iterator[str]:
    """The texts of a ``.txt`` file (each line is one, including its line break), ``.jsonl`` or ``.parquet`` file.

    ``.gz`` and ``.zst`` may follow the ending of a text or JSON file.

    Args:
        file: the path.
        text_key: the key or column of the text.
        on_error: for a line that is no JSON object with such a text: ``stop`` raises, ``skip`` warns and continues.

    Raises:
        ValueError: an unknown ending, or a line that cannot be read.
    """
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    endings = [ending for ending in path.suffixes if ending not in COMPRESSED]
    kind = endings[-1] if endings else ""
    if kind == ".txt":
        return _lines(path)
    if kind in (".jsonl", ".json"):
        return open_jsonl(path, text_key, on_error)
    if kind == ".parquet":
        return _parquet(path, text_key)
    raise ValueError(f"{path}: the ending is not .txt, .jsonl or .parquet (.gz and .zst may follow)")


def open_jsonl(file: str | os.PathLike[str], json_key: str, on_error: str = "stop") -> Iterator[str]:
    """The texts of a file with a JSON object on each line; ``.jsonl`` is added to a name that is no file without it."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r} is not one of {', '.join(ON_ERROR)}")
    path = Path(file)
    if not path.is_file() and not str(file).endswith(".jsonl"):
        path = Path(f"{os.fspath(file)}.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    return _json_texts(path, json_key, on_error)


def _json_texts(path: Path, key: str, on_error: str) -> Iterator[str]:
    with _open(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield _json_text(line, key)
            except ValueError as error:
                message = f"{path}, line {number}: {error}"
                if on_error == "stop":
                    raise ValueError(f"{message}; on_error='skip' leaves such lines out") from None
                warnings.warn(f"left out: {message}", stacklevel=2)


def _json_text(line: bytes, key: str) -> str:
    try:
        found = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(found, dict) or key not in found:
        there = f"its keys are {', '.join(map(repr, found))}" if isinstance(found, dict) else "it is no object"
        raise ValueError(f"no key {key!r}: {there}")
    text = found[key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {key!r} is {type(text).__name__} and not a text")
    return text


def _lines(path: Path) -> Iterator[str]:
    with _open(path) as file:
        yield from io.TextIOWrapper(file, encoding="utf-8")


def _open(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            raise ValueError(f"{path}: reading .zst needs zstandard; pip install 'oslo-models[data]'") from None
        return io.BufferedReader(zstandard.open(path, "rb"))
    return path.open("rb")


def _parquet(path: Path, key: str) -> Iterator[str]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow; pip install 'oslo-models[data]'") from None
    with pyarrow.parquet.ParquetFile(path, memory_map=True) as file:
        if key not in file.schema_arrow.names:
            raise ValueError(f"{path}: no column {key!r}; there are {', '.join(file.schema_arrow.names)}")
        for batch in file.iter_batches(ROWS, columns=[key]):
            yield from batch.column(0).to_pylist()


def texts_of(iterable: Iterable[Any], key: str) -> Iterator[str]:
    """The texts of an iterable of strings or of rows with a column ``key``, or of a Hugging Face dataset.

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
            raise ValueError(f"document {number}{of} is {type(text).__name__} and not a text")
        yield text
