"""Damaged, truncated and differently encoded files: none is read as complete; errors name the file and the record."""

from __future__ import annotations

import codecs
import gzip
import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from oslo_models.cli import main as cli
from oslo_models.data.readers import open_documents

from support.corpora import tokenizer

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")
zstandard = pytest.importorskip("zstandard")

TEXTS = [f"document {number} é 😀 {number * 7919}\n" for number in range(3000)]
PLAIN = "".join(TEXTS).encode()
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zst_frames(data: bytes) -> bytes:
    """Write several frames, one of them skippable, like parallel compressors."""
    half = len(data) // 2
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
    return zstandard.compress(data[:half]) + skippable + zstandard.compress(data[half:])


COMPRESSIONS = {
    ".txt.gz": gzip.compress(PLAIN),
    ".jsonl.gz": gzip.compress(LINES),
    ".txt.zst": zstandard.compress(PLAIN),
    ".jsonl.zst": zstandard.compress(LINES),
    ".frames.txt.zst": zst_frames(PLAIN),
    ".members.txt.gz": gzip.compress(PLAIN[:5000]) + gzip.compress(PLAIN[5000:]),
}


def read(path: Path, **options: Any) -> list[str]:
    return list(open_documents(path, **options))


@pytest.mark.parametrize("ending", COMPRESSIONS)
@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_no_compressed_file_ends_quietly(ending: str, on_error: str, tmp_path: Path, seed: int) -> None:
    rng, data, path = random.Random(seed), COMPRESSIONS[ending], tmp_path / f"a{ending}"
    path.write_bytes(data)
    assert read(path, on_error=on_error) == TEXTS
    cuts = [0, 1, 3, len(data) // 2, len(data) - 1, *(rng.randrange(len(data)) for _ in range(4))]
    damaged = {f"cut at {cut}": data[:cut] for cut in cuts}
    damaged |= {"garbage after it": data + b"garbage", "another format": b"not compressed\n" * 9}
    whole = len(gzip.compress(PLAIN[:5000])) if "members" in ending else -1
    for what, wrong in damaged.items():
        if len(wrong) == whole:
            continue
        path.write_bytes(wrong)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match=rf"a{ending}, after line \d+: .*damaged or cut off.*complete copy"):
                print(what, len(read(path, on_error=on_error)))


def test_parquet_is_read_whole_or_refused(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "a.parquet", random.Random(seed)
    table = pyarrow.table({"text": TEXTS})
    parquet.write_table(table, path, row_group_size=500, compression="none", write_page_checksum=True)
    data = path.read_bytes()
    assert read(path) == TEXTS
    for _ in range(10):
        at = rng.randrange(len(data))
        path.write_bytes(data[:at])
        with pytest.raises(ValueError, match=r"a.parquet, after row \d+: .*damaged"):
            read(path, on_error="skip")
    at = data.index(TEXTS[1234].encode())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(ValueError, match=r"a.parquet, after row \d+"):
        read(path, on_error="skip")


def test_columns_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    for column in ([b"x"], [1], [["x"]], [{"a": "x"}]):
        parquet.write_table(pyarrow.table({"text": column}), path)
        with pytest.raises(ValueError, match=r"column 'text' has the type .* instead of text"):
            read(path, on_error="skip")
    for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int8(), pyarrow.string())):
        parquet.write_table(pyarrow.table({"text": pyarrow.array(["a", "b"], kind)}), path)
        assert read(path) == ["a", "b"]


DEEP = b'{"text": "x", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
RECORDS: dict[str, tuple[str, bytes, str]] = {
    "bad UTF-8 in a text": (".txt", b"a\n\xff b\nc\n", "line 2: not UTF-8"),
    "a part of a character": (".txt", b"a\n\xf0\x9f\nc\n", "line 2: not UTF-8"),
    "a surrogate in bytes": (
        ".jsonl",
        b'{"text": "a\\n"}\n{"text": "\xed\xa0\x80"}\n{"text": "c\\n"}\n',
        "line 2: not JSON",
    ),
    "deep JSON": (".jsonl", b'{"text": "a\\n"}\n' + DEEP + b'\n{"text": "c\\n"}\n', "line 2: not JSON"),
    "a cut line": (".jsonl", b'{"text": "a\\n"}\n{"text": "c\\n"}\n{"text": "d', "line 3: not JSON"),
    "a long number": (".jsonl", b'{"text": "a\\n"}\n{"n": ' + b"9" * 9999 + b'}\n{"text": "c\\n"}', "line 2: not JSON"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_records_that_cannot_be_read_are_named_and_can_be_skipped(what: str, tmp_path: Path) -> None:
    ending, data, message = RECORDS[what]
    path = tmp_path / f"a{ending}"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"a{ending}, {message}.*on_error='skip' skips such lines"):
        read(path)
    with pytest.warns(UserWarning, match=f"skipped: .*a{ending}, {message}"):
        assert read(path, on_error="skip") == ["a\n", "c\n"]


def test_rows_without_a_text_are_named_and_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    raw = pyarrow.array([b"b", None, b"\xff", b"c"], pyarrow.binary())
    column = pyarrow.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    parquet.write_table(pyarrow.table({"text": column}), path)
    with pytest.raises(ValueError, match=r"a.parquet, row 2: the value of 'text' is NoneType.*on_error='skip'"):
        read(path)
    with pytest.warns(UserWarning, match=r"a.parquet, row 3: .*utf-8"):
        assert read(path, on_error="skip") == ["b", "c"]


def test_byte_order_marks_are_no_text(tmp_path: Path) -> None:
    for ending, data in ((".txt", PLAIN), (".jsonl", LINES)):
        (tmp_path / f"a{ending}").write_bytes(codecs.BOM_UTF8 + data)
        (tmp_path / f"a{ending}.gz").write_bytes(gzip.compress(codecs.BOM_UTF8 + data))
        assert read(tmp_path / f"a{ending}") == read(tmp_path / f"a{ending}.gz") == TEXTS
        for encoding in ("utf-16", "utf-16-be", "utf-32"):
            mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
            (tmp_path / f"b{ending}").write_bytes(mark + data.decode().encode(encoding))
            with pytest.raises(ValueError, match=f"b{ending}: .*UTF-16.*convert it to UTF-8"):
                read(tmp_path / f"b{ending}", on_error="skip")


def test_line_breaks_of_a_text_equal_python(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("a\r\nb\rc\n\n\r\n\x0b d\u2028e\x85f\r".encode())
    with path.open(encoding="utf-8") as file:
        assert read(path) == list(file)


def test_command_names_its_own_option_and_succeeds_only_with_everything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "good.txt").write_text("a\n")
    (tmp_path / "bad.txt").write_bytes(b"a\n\xff\n")
    (tmp_path / "cut.txt.zst").write_bytes(COMPRESSIONS[".txt.zst"][:-9])
    (tmp_path / "cut.txt.gz").write_bytes(COMPRESSIONS[".txt.gz"][:-9])
    command = ["preprocess", "-t", str(tmp_path / "tokenizer"), "-o", str(tmp_path / "out"), "--workers", "0"]
    for name, skips in (("bad.txt", False), ("cut.txt.zst", True), ("cut.txt.zst", False), ("cut.txt.gz", True)):
        given = [
            str(tmp_path / "good.txt"),
            str(tmp_path / name),
            "--restart",
            *(["--skip-malformed"] if skips else []),
        ]
        assert cli.main([*command, *given]) == 2
        error = capsys.readouterr().err
        assert name in error and "on_error" not in error and not (tmp_path / "out.idx").exists()
        assert "--skip-malformed" in error if name == "bad.txt" else "complete copy" in error
    assert cli.main([*command, str(tmp_path / "bad.txt"), "--skip-malformed", "--restart"]) == 0
    assert "bad.txt, line 2: not UTF-8" in capsys.readouterr().err
