"""Drawn files, most of them damaged, compared with json, gzip, zstandard and pyarrow: none is silently read wrongly."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oslo_models.data import DatasetForCausalLM
from oslo_models.data.indexed_dataset import IMPLS, IndexedDataset
from oslo_models.data.readers import open_documents

from support.corpora import write

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

VALUES = ["plain", "é😀", "a\nb", "x\u2028y\x85z", "\0", "", " ", "a\r\nb\rc", "\ufeffx", "long " * 300, "\\u", '"q"']
LINES = ["", "   ", '{"text": null}', '{"text": 5}', '{"text": ["a"]}', '{"text": NaN}', '{"n": NaN, "text": "ok"}']
LINES += ['{"text": "first", "text": "second"}', '{"n": ' + "9" * 30 + ', "text": "big"}', '{"text": "\\ud800"}']
LINES += ['{"n": ' + "9" * 5000 + ', "text": "too big"}', "{", "[]", "null", '"s"', '{"other": 1}']
LINES += ['{"text": "a"} trailing', '{"text": "a"}{"text": "b"}', '\ufeff{"text": "a"}', '{"text": "a\tb"}']
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
INSERTED = [b"\xff", b"\0", b"\n", b"\xed\xa0\x80", b"\xc3", b"\r", b'"', b"\x1f\x8b"]
ENCODINGS = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"]
DAMAGES: tuple[Callable[[random.Random, bytes, int], bytes], ...] = (
    lambda rng, data, at: data,
    lambda rng, data, at: data[:at],
    lambda rng, data, at: data[:at] + bytes(each ^ 1 << at % 8 for each in data[at : at + 1]) + data[at + 1 :],
    lambda rng, data, at: data[:at] + rng.choice(INSERTED) + data[at:],
    lambda rng, data, at: data[: at + 50] + data[at:],
    lambda rng, data, at: data[:at] + bytes(len(data[at : at + 8])) + data[at + 8 :],
    lambda rng, data, at: codecs.BOM_UTF8 + data,
    lambda rng, data, at: data.decode("utf-8", "replace").encode("latin-1", "replace"),
    lambda rng, data, at: data.decode("utf-8", "replace").encode(rng.choice(ENCODINGS), "replace"),
    lambda rng, data, at: b"",
    lambda rng, data, at: rng.choice([b"\0\0", b"\xff\xfe", b"garbage"]) + data,
    lambda rng, data, at: data + rng.choice([b"\0\0", b"garbage", b"\x1f\x8b"]),
)


def damaged(rng: random.Random, data: bytes) -> bytes:
    return rng.choice(DAMAGES)(rng, data, rng.randrange(len(data) + 1))


def read(path: Path, on_error: str) -> tuple[Any, int]:
    """Return the texts or the error, and the number of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            return list(open_documents(path, on_error=on_error)), len(caught)
        except ValueError as error:
            assert path.name in str(error)
            return error, len(caught)


def require_read(path: Path, texts: list[str], wrong: list[int]) -> None:
    """Require these texts, and an error or a warning for each wrong record."""
    found, _ = read(path, "stop")
    if wrong:
        assert isinstance(found, ValueError) and f" {wrong[0]}: " in str(found)
    else:
        assert found == texts
    assert read(path, "skip") == (texts, len(wrong))


def require_refused(path: Path) -> None:
    assert all(isinstance(read(path, way)[0], ValueError) for way in ("stop", "skip"))


# JSON lines and texts -------------------------------------------------------------------------------------------------


def json_texts(data: bytes) -> tuple[list[str], list[int]]:
    """Return the texts and the numbers of the wrong lines."""
    texts, wrong = [], []
    for number, line in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), start=1):
        try:
            text = json.loads(line.removeprefix(codecs.BOM_UTF8).decode())["text"] if line.strip() else None
        except (ValueError, KeyError, TypeError):
            wrong.append(number)
            continue
        if isinstance(text, str):
            texts.append(text)
        elif line.strip():
            wrong.append(number)
    return texts, wrong


def plain_texts(data: bytes) -> tuple[list[str], list[int]]:
    lines = data.removeprefix(codecs.BOM_UTF8).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    texts, wrong = [], []
    for number, line in enumerate([*(each + b"\n" for each in lines[:-1]), *filter(None, lines[-1:])], start=1):
        try:
            texts.append(line.decode())
        except ValueError:
            wrong.append(number)
    return texts, wrong


def unpacked(data: bytes, ending: str) -> bytes | None:
    """Return the content of a compressed file; ``None`` if it is damaged."""
    if not ending:
        return data
    made = b""
    try:
        if ending == ".gz":
            return gzip.decompress(data) if data else None
        while data or not made:
            frame = zstandard.ZstdDecompressor().decompressobj()
            made += frame.decompress(data)
            if not frame.eof:
                return None
            data = frame.unused_data
            if not data:
                break
    except Exception:  # noqa: BLE001  of any kind: the file is damaged
        return None
    return made


def lines_case(rng: random.Random, folder: Path) -> None:
    kind, ending = rng.choice([".jsonl", ".json", ".txt"]), rng.choice(["", "", ".gz", ".zst"])
    rows = [rng.choice(VALUES) for _ in range(rng.randint(1, 30))]
    if kind == ".txt":
        data = b"".join((row + rng.choice(["\n", "\r\n", "\r", ""])).encode() for row in rows)
    else:
        made = [json.dumps({"text": row}, ensure_ascii=rng.random() < 0.5) for row in rows]
        made = [rng.choice(LINES) if rng.random() < 0.15 else line for line in made]
        data = rng.choice(["\n", "\r\n"]).join(made).encode() + rng.choice([b"\n", b""])
    inside = not ending or rng.random() < 0.4
    data = damaged(rng, data) if inside else data
    packed = {"": lambda data: data, ".gz": gzip.compress, ".zst": zstandard.compress}[ending](data)
    path = folder / f"file{kind}{ending}"
    path.write_bytes(packed if inside else damaged(rng, packed))
    content = unpacked(path.read_bytes(), ending)
    if content is None or content.startswith(UTF16):
        require_refused(path)
    else:
        require_read(path, *(plain_texts if kind == ".txt" else json_texts)(content))


# Parquet --------------------------------------------------------------------------------------------------------------

COLUMNS = {
    **{str(kind): kind for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.string_view())},
    "dictionary": pyarrow.dictionary(pyarrow.int32(), pyarrow.string()),
    "nulls": pyarrow.string(),
}


def rows_of(column: Any) -> list[Any]:
    """Return the rows of a column, and bytes in place of a row that is no UTF-8.

    Raises:
        Exception: the column is damaged.
    """
    try:
        column.validate(full=True)
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
        raw = column.cast(pyarrow.large_binary())
        raw.validate(full=True)
        return [_text_or_bytes(row) for row in raw.to_pylist()]
    return list(column.to_pylist())


def _text_or_bytes(row: bytes | None) -> Any:
    try:
        return None if row is None else row.decode()
    except UnicodeDecodeError:
        return row


def parquet_case(rng: random.Random, folder: Path) -> None:
    path, kind = folder / "file.parquet", rng.choice([*COLUMNS, "numbers"])
    rows: list[Any] = [rng.choice(VALUES) for _ in range(rng.randint(0, 300))]
    if kind == "nulls":
        rows = [None if rng.random() < 0.1 else row for row in rows]
    column = pyarrow.array(range(len(rows))) if kind == "numbers" else pyarrow.array(rows).cast(COLUMNS[kind])
    options: dict[str, Any] = {"compression": rng.choice(["none", "snappy", "gzip", "zstd"])}
    options |= {"row_group_size": rng.choice([1 << 20, 7]), "data_page_version": rng.choice(["1.0", "2.0"])}
    options |= {"use_dictionary": rng.random() < 0.5, "write_page_checksum": rng.random() < 0.7}
    parquet.write_table(pyarrow.table({"text": column}), path, **options)
    path.write_bytes(damaged(rng, path.read_bytes()))
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            expected = rows_of(file.read(columns=["text"]).column("text"))
            complete = len(expected) == file.metadata.num_rows
    except Exception:  # noqa: BLE001  of any kind: the file is damaged
        complete = False
    if complete and (kind != "numbers" or not expected):  # without rows, there are no numbers
        wrong = [number for number, row in enumerate(expected, start=1) if not isinstance(row, str)]
        require_read(path, [row for row in expected if isinstance(row, str)], wrong)
    else:
        require_refused(path)


# Binarised datasets ---------------------------------------------------------------------------------------------------


def index_case(rng: random.Random, folder: Path) -> None:
    """Damage one of the files of a dataset, or the stored order of its samples."""
    name, dtype = folder / "data", rng.choice(["uint16", "int32", "int64", "float32"])
    lengths = [rng.randint(0, 20) for _ in range(rng.randint(2, 40))] + [20]
    tokens = write(name, lengths, dtype, rng.choice(IMPLS[:2]))
    samples = [each.tolist() for each in DatasetForCausalLM(name, 9)]
    path = rng.choice([folder / "data.bin", *[folder / "data.idx"] * 2, *sorted((folder / "data.index").rglob("*.*"))])
    before = path.read_bytes()
    path.write_bytes(damaged(rng, before))
    if path.suffix == ".bin" and len(path.read_bytes()) == len(before):
        return  # the format has no checksum of tokens
    try:
        if path.suffix in (".bin", ".idx"):
            documents = np.split(tokens, np.cumsum(lengths)[:-1])
            for impl in IMPLS:  # sequences only: other boundaries of documents can be as consistent as the old ones
                found = IndexedDataset(name, impl)
                assert [each.tolist() for each in found] == [each.tolist() for each in documents]
        else:
            assert [each.tolist() for each in DatasetForCausalLM(name, 9)] == samples
    except ValueError as error:
        assert "data" in str(error) and path.read_bytes() != before


CASES = {case.__name__: case for case in (lines_case, parquet_case, index_case)}


def run_cases(case: str, count: int, seed: int, folder: Path) -> None:
    for number in range(count):
        own = folder / str(number)
        own.mkdir()
        try:
            CASES[case](random.Random(f"{seed} {number}"), own)
        except BaseException as error:
            error.add_note(f"{case}, seed {seed}, number {number}, files in {own}")
            raise


@pytest.mark.parametrize("case", CASES)
def test_drawn_files_are_read_whole_or_refused(case: str, tmp_path: Path, seed: int) -> None:
    run_cases(case, 40, seed, tmp_path)


@pytest.mark.zoo
@pytest.mark.parametrize("case", CASES)
def test_more_drawn_files_are_read_whole_or_refused(case: str, tmp_path: Path, seed: int) -> None:
    run_cases(case, 600, seed + 1, tmp_path)


@pytest.mark.parametrize("name", ["file.txt", "file.jsonl", "file.txt.gz"])
def test_file_of_a_byte_order_mark_has_no_texts(name: str, tmp_path: Path) -> None:
    data = codecs.BOM_UTF8
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    require_read(tmp_path / name, [], [])
