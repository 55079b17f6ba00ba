"""``oslo-models preprocess``: its files, output and exit codes."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from oslo_models.cli import main as cli
from oslo_models.data import IndexedDataset

from support.corpora import expected, tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    lines = [json.dumps({"body": "def one"}), "broken", json.dumps({"body": ""}), json.dumps({"body": "return two"})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"three\n\nfour"))
    return tmp_path


def test_preprocess_command_writes_a_dataset(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = [str(folder / "a.jsonl"), str(folder / "b.txt.gz"), "--text-key", "body", "--workers", "0"]
    common = ["preprocess", *inputs, "-o", str(folder / "out")]
    assert cli.main([*common, "-t", str(folder / "tokenizer")]) == 2
    error = capsys.readouterr().err
    assert "a.jsonl, line 2: not JSON" in error and "Traceback" not in error
    assert not (folder / "out.idx").exists()
    for name, eod in (("tokenizer", []), ("tokenizer/tokenizer.json", ["--eod", "self"])):
        command = [*common, "-t", str(folder / name), "--skip-malformed", "--restart", "--chunk-size", "2", *eod]
        assert cli.main(command) == 0
        shown = capsys.readouterr()
        left_out = [line for line in shown.err.splitlines() if "skipped: " in line]
        assert len(left_out) == 1 and "a.jsonl, line 2: not JSON" in left_out[0] and "UserWarning" not in shown.err
        texts = ["def one", "", "return two", "three\n", "\n", "four"]
        right = expected(texts, tokenizer(), tokenizer().get_vocab()["self"] if eod else 0)
        assert [found.tolist() for found in IndexedDataset(folder / "out")] == right
        assert f"5 documents, {sum(map(len, right))} tokens, uint16; 1 documents without" in shown.out
    assert cli.main([*common, "-t", str(folder / "tokenizer"), "--skip-malformed", "--no-eod", "--format", "lazy"]) == 0
    assert [found.tolist() for found in IndexedDataset(folder / "out")] == expected(texts, tokenizer(), None)
    assert (folder / "out.idx").read_bytes().startswith(b"TNTIDX")


def test_preprocess_command_reports_user_errors_in_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = ["preprocess", "-o", str(folder / "out"), "-t", str(folder / "tokenizer"), str(folder / "b.txt.gz")]
    (folder / "c.csv").write_text("")
    for arguments, message in (
        ([*known, "--eod", "absent"], "'absent' is not a token"),
        ([*known, "--eod", "self", "--no-eod"], "exclude each other"),
        ([*known, str(folder / "absent.txt")], "no file"),
        ([*known, str(folder / "c.csv")], "the ending is not"),
        ([*known, "--workers", "-1"], "num_workers=-1"),
        ([*known, "--dtype", "uint32"], "dtype='uint32'"),
    ):
        assert cli.main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("oslo-models preprocess: error: ") and error.count("\n") == 1 and message in error
    assert not list(folder.glob("out*"))
